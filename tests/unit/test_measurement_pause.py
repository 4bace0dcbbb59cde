"""A benchmark's mark lies in a directory of the engine's: root follows and empties nothing there."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from rigctl.guarded import Place
from rigctl.supervisor.measurement_pause import is_measured, undisturbed


def test_the_mark_is_a_lock(tmp_path: Path) -> None:
    specification: Any = SimpleNamespace(runtime=Place(str(tmp_path)))
    with undisturbed(specification):
        assert is_measured(specification)
    assert not is_measured(specification)


def test_a_link_in_its_place_is_not_followed(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("kept")
    precious.chmod(0o600)
    (tmp_path / "measured").symlink_to(precious)
    specification: Any = SimpleNamespace(runtime=Place(str(tmp_path)))
    with undisturbed(specification):
        pass
    assert precious.read_text() == "kept" and precious.stat().st_mode & 0o777 == 0o600
