from pyinfra import config
from pyinfra.api.exceptions import PyinfraError

from rig.catalog.entries import check_all
from rig.catalog.yaml_source import CatalogError

config.REQUIRE_PYINFRA_VERSION = "~=3.10"

# Read before the inventory, so that a wrong catalogue ends every command before any host is touched.
try:
    check_all()
except CatalogError as error:
    raise PyinfraError(f"wrong catalogue, nothing was done:\n{error}") from None
