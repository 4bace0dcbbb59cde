import os

from pyinfra import config
from pyinfra.api.exceptions import PyinfraError

from rig.catalog.entries import check_all
from rig.catalog.yaml_source import CatalogError
from rig.cli.pyinfra_mends import mend
from rigctl.contract.layout import LOCALE

config.REQUIRE_PYINFRA_VERSION = "~=3.10"
# pyinfra 3.10 loses config.ENV when it copies its settings for a host.
os.environ.update(LOCALE)
config.INHERIT_ENV = tuple(LOCALE)
mend()

# Read before the inventory, so that a wrong catalogue ends every command before any host is touched.
try:
    check_all()
except CatalogError as error:
    raise PyinfraError(f"wrong catalogue, nothing was done:\n{error}") from None
