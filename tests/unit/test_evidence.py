"""Evidence about host settings: one record a report, authors counted, old ones expired, opposing ones shown."""

from __future__ import annotations

from datetime import timedelta

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from rig.catalog.yaml_source import CatalogError
from rig.host.evidence import EXPIRES, FILE, Evidence, authors, evidence, parse
from rig.host.explanation import explain_text
from rig.host.topology import STAGES, decide
from tests.unit import host_archetypes as hosts

RULES = {rule.name: rule for stage in STAGES for rule in stage}
RECORD = "{for: [hmm], says: it hangs, source: a/b#1, author: %s, date: %s}"


def file(*records: str) -> Evidence:
    return parse("reviewed: 2026-12-01\nreports:\n" + "".join(f"  - {one}\n" for one in records))


def test_every_record_is_about_a_rule_and_every_rule_has_one() -> None:
    named = {name for one in evidence().reports for name in (*one.supports, *one.against)}
    assert not named - RULES.keys()
    without = RULES.keys() - named
    # Nothing was published about it, as it says.
    assert without == {"force-p2p-mixed", "force-p2p-vm"}


def test_a_page_is_no_author() -> None:
    same = file(RECORD % ("wiki", "2026-05-01"), RECORD % ("wiki", "2026-06-01"))
    assert authors(same.reports) == 1
    assert authors(file(RECORD % ("wiki", "2026-05-01"), RECORD % ("sjug", "2026-05-01")).reports) == 2


def test_launches_of_several_hosts_are_several_authors() -> None:
    one = "{for: [limits], collection: true, says: x, source: a/b, author: wiki, date: 2026-05-01}"
    assert authors(file(one, RECORD % ("wiki", "2026-05-01")).reports) == 2


def test_old_reports_expire_and_a_vendors_word_does_not() -> None:
    day = evidence().reviewed
    old, young = f"{day - EXPIRES - timedelta(days=1)}", f"{day - EXPIRES}"
    vendor = f"{{for: [hmm], vendor: true, says: x, source: a, author: NVIDIA, date: {old}}}"
    found = file(RECORD % ("a", old), RECORD % ("b", young), vendor).about("hmm")[0]
    assert [one.author for one in found] == ["b", "NVIDIA"]


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ("{says: x, source: a, author: b, date: 2026-05-01}", "neither for nor against"),
        ("{for: [hmm], says: x, source: a, author: b, date: soon}", "reports.0.date"),
        ("{for: [hmm], says: one, two, source: a, author: b, date: 2026-05-01}", "reports.0.two"),
        ("{for: [hmm], says: x, author: b, date: 2026-05-01}", "reports.0.source"),
        ("{for: [", "evidence.yaml: "),
    ],
)
def test_a_wrong_record_is_refused_with_its_place(record: str, words: str) -> None:
    with pytest.raises(CatalogError, match=words):
        file(record)


@given(
    st.text(max_size=200) | st.recursive(st.none() | st.integers() | st.text(), st.lists, max_leaves=5).map(yaml.dump)
)
def test_foreign_text_is_refused_and_never_a_traceback(text: str) -> None:
    with pytest.raises(CatalogError):
        parse(text)


def test_the_file_is_one_record_a_line() -> None:
    lines = [line for line in FILE.read_text().splitlines() if line.startswith("  - ")]
    assert len(lines) == len(evidence().reports)


def test_opposing_reports_are_shown() -> None:
    page = explain_text("host", hosts.TURIN_DIRECT, decide(hosts.TURIN_DIRECT))
    iommu = page[page.index("iommu = off") :]
    assert "4 for, 3 against" in iommu.splitlines()[0]
    assert "against: iommu=pt works as well" in iommu
    whole = explain_text("host", hosts.TURIN_DIRECT, decide(hosts.TURIN_DIRECT), everything=True)
    assert "sjug/rtx6kpro optimization/io-tuning.md, sjug, 2026-08-04" in whole
    for rule in ("force-p2p", "proto-ll-newer"):
        for report in (*evidence().about(rule)[0], *evidence().about(rule)[1]):
            assert report.source in " ".join(whole.split()), report
