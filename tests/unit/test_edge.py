"""The edge: what a host's data and entries make of it, and that nothing foreign gets into its files. Pure."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from rig.artifacts.edge import CERTIFICATE, CONFIGURATION, UNIT, certification, edge_files, keys_map, places, routes
from rig.artifacts.receipt import receipt_items
from rig.artifacts.rollback_states import state_of
from rig.artifacts.units import run_specification, unit_file, unit_files
from rig.catalog.entries import Configuration, Listen, load_catalog
from rig.catalog.yaml_source import CatalogError
from rig.cli.connect import talk_lines
from rig.facts.servers import Server
from rig.plan.edge import Edge, EdgeData, edge_of, takeovers
from rig.plan.host_plan import HostPlan
from rig.plan.neighbours import interruptions
from rigctl.contract import layout
from tests.support.plans import data, gpu_plan

EDGE: dict[str, Any] = {
    "address": "10.0.0.5",
    "port": 8443,
    "tls": {"certificate": "~/kimi.pem", "key": "~/kimi.key"},
    "keys": {"alice": "~/alice.key", "ci": f"sha256:{'0a' * 32}"},
    "networks": ["10.0.0.0/8"],
    "metrics_networks": ["10.0.9.1"],
}


def with_edge(**changes: Any) -> HostPlan:
    return gpu_plan(edge={**EDGE, **changes}, configurations=["vllm-base", "sglang-base"])


def entries(**listening: Listen) -> dict[str, Configuration]:
    """Configurations that listen as said."""
    base = load_catalog().serving["vllm-base"]
    return {name.replace("_", "-"): base.model_copy(update={"listen": listen}) for name, listen in listening.items()}


def taken_over(key: str | None = "~/key", **listening: Listen) -> tuple[Edge, dict[str, Configuration]]:
    edge, moved = edge_of(None, key, entries(**listening))
    assert edge is not None
    return edge, moved


def test_who_issues_its_certificate_is_read_from_its_files() -> None:
    names = ["kimi-1.example.com", "10.0.0.5", "fc00::1"]
    check = [layout.RIGCTL, "edge-certificate", "--check", *names]
    assert certification(edge_files(with_edge(tls={"authority": names}))) == (check, CERTIFICATE)
    acme = {"names": ["kimi-1.example.com"], "email": "me@example.com"}
    assert certification(edge_files(with_edge(tls={"acme": acme}))) == (
        ["true"],
        "/var/lib/kimi-edge/certificates/kimi-1.example.com.pem",
    )
    assert certification(edge_files(with_edge())) is None, "it is given"
    assert certification(edge_files(with_edge(tls="none"))) is None and certification({}) is None


def test_a_host_whose_engines_listen_on_loopback_has_none() -> None:
    plan = gpu_plan(api_key_file="~/key")
    assert plan.edge is None and not edge_files(plan)
    assert plan.secrets == {"api-key": "~/key"}
    assert f"LoadCredential=api-key:{layout.API_KEY}\n" in unit_file(plan, "vllm-base")
    assert "edge" not in receipt_items(plan, "") and UNIT not in state_of(plan)["files"]


def test_an_edge_of_the_host_data_leaves_the_engines_where_they_are() -> None:
    plan = with_edge()
    assert plan.edge is not None
    [listener] = plan.edge.listeners
    assert (listener.place, listener.networks) == ("10.0.0.5:8443", ["10.0.0.0/8"])
    assert listener.engines.keys() == plan.serving.keys()
    assert {(one.listen.host, one.listen.port) for one in plan.serving.values()} == {("127.0.0.1", 8000)}
    assert not [*takeovers(plan.edge)]


def test_engines_behind_the_edge_have_a_key_of_the_hosts_own() -> None:
    plan = with_edge()
    unit = unit_file(plan, "vllm-base")
    assert f"LoadCredential=api-key:{layout.ENGINE_KEY}\n" in unit
    assert f"\nWants={layout.EDGE_UNIT}\nAfter={layout.EDGE_UNIT}\n" in unit
    assert run_specification(plan, "vllm-base").api_key
    assert "api-key" not in plan.secrets, "the host has the digest of a client's key, not the key"
    assert not any("alice.key" in text or "0a0a" in text for text in unit_files(plan).values())


@pytest.mark.parametrize("key", ["api_key_file", "keys"])
def test_the_api_key_file_is_its_first_key(key: str) -> None:
    plan = gpu_plan(api_key_file="~/key", edge={**EDGE, "keys": {"alice": "~/a"} if key == "keys" else {}})
    assert plan.edge is not None
    assert next(iter(plan.edge.keys.items())) == ("api-key", "~/key")
    assert plan.edge.key_files == ({"alice": "~/a"} if key == "keys" else {})


def test_an_entry_that_listens_beyond_loopback_keeps_address_port_networks_and_key() -> None:
    edge, moved = taken_over(lan=Listen(host="0.0.0.0", port=8000, networks=["10.0.0.0/8", "192.168.7.0/24"]))
    [listener] = edge.listeners
    assert (listener.place, listener.networks) == ("0.0.0.0:8000", ["10.0.0.0/8", "192.168.7.0/24"])
    assert (edge.keys, edge.tls) == ({"api-key": "~/key"}, None)
    assert (moved["lan"].listen.host, moved["lan"].listen.port) == ("127.0.0.1", 18000)
    [line] = takeovers(edge)
    for part in ("0.0.0.0:8000", "kimi-lan.service", "127.0.0.1:18000", "plain HTTP", "404"):
        assert part in line


def test_an_entry_that_was_open_without_a_key_stays_open() -> None:
    edge, _ = taken_over(None, lan=Listen(host="10.0.0.5", open_without_key=True))
    assert not edge.keys


def test_entries_that_shared_a_port_share_one_again_and_others_have_their_own() -> None:
    edge, moved = taken_over(
        a=Listen(host="0.0.0.0", port=8000),
        b=Listen(host="0.0.0.0", port=8000),
        c=Listen(host="10.0.0.5", port=8001),
        d=Listen(port=18001),
    )
    assert {name: entry.listen.port for name, entry in moved.items()} == {
        "a": 18000,
        "b": 18000,
        "c": 18002,
        "d": 18001,
    }
    assert [(one.name, one.place) for one in edge.listeners] == [("edge", "0.0.0.0:8000"), ("edge-2", "10.0.0.5:8001")]
    assert not edge.before(moved["d"]), "it keeps its address and its key"
    assert all(edge.before(moved[name]) for name in "abc")


def test_who_reached_which_engine_is_kept() -> None:
    """Of entries at one address each keeps its own networks; one on loopback is reached from loopback alone."""
    edge, moved = taken_over(
        named=Listen(host="0.0.0.0", networks=["10.0.0.0/8"]), all=Listen(host="0.0.0.0"), local=Listen()
    )
    [listener] = edge.listeners
    groups = {name: group.networks for group in listener.groups for name in group.engines}
    assert groups == {"named": ("10.0.0.0/8",), "all": (), "local": ("127.0.0.0/8", "::1/128")}
    assert listener.networks == [], "one of them is for everyone"
    assert {entry.listen.port for entry in moved.values()} == {18000}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"address": "kimi-1.example.com"}, "edge.address: not an IP address"),
        ({"address": "fe80::1%eth0\n bind"}, "edge.address: "),
        ({"port": 0}, "edge.port: "),
        ({"tls": "off"}, "edge.tls"),
        ({"tls": "none"}, None),
        ({"tls": "none", "address": "0.0.0.0"}, "is not an address of a private network"),
        ({"tls": "none", "address": "203.0.113.7"}, "is not an address of a private network"),
        ({"tls": {}}, "names one of these: certificate and key"),
        ({"tls": {"certificate": "~/c"}}, "belong together"),
        ({"tls": {"certificate": "~/c", "key": "~/k", "authority": ["kimi-1"]}}, "names one of these"),
        ({"tls": {"authority": ["kimi 1"]}}, "a host name is in lower case"),
        ({"tls": {"authority": ["1.2.3.4.5"]}}, "edge.tls.authority.0: "),
        ({"tls": {"acme": {"names": ["kimi.example.com"], "email": "me"}}}, "an e-mail address"),
        ({"tls": {"acme": {"names": [], "email": "me@example.com"}}}, "edge.tls.acme.names"),
        ({"tls": {"acme": {"names": ["10.0.0.5"], "email": "me@example.com"}}}, "a host name is in lower case"),
        ({"tls": {"certificat": "~/c"}}, 'there is no such key, did you mean "certificate"?'),
        ({"keys": {}}, "edge.keys: there is no key"),
        ({"keys": {"Alice": "~/a"}}, "lower-case letters"),
        ({"keys": {"a b": "~/a"}}, "lower-case letters"),
        ({"keys": {"alice": "sha256:12"}}, "a digest is sha256: and 64 hex digits"),
        ({"keys": {"alice": "prompt"}}, "name a file on your machine"),
        ({"keys": {"alice": ""}}, "edge.keys.alice: "),
        ({"networks": ["10.0.0.0/99"]}, "edge.networks.0: "),
        ({"network": ["10.0.0.0/8"]}, 'there is no such key, did you mean "networks"?'),
        ({"limits": {"request_mib": 0}}, "edge.limits.request_mib: "),
        ({"limits": {"requests_a_minut": 5}}, 'did you mean "requests_a_minute"?'),
    ],
)
def test_wrong_data_is_named(changes: dict[str, Any], message: str | None) -> None:
    if message is None:
        with_edge(**changes)
        return
    with pytest.raises(CatalogError, match="host data") as caught:
        with_edge(**changes)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "listen",
    [
        Listen(host="0.0.0.0"),
        Listen(host="10.0.0.5", port=8000),
        Listen(host="10.0.0.5", port=8443, networks=["192.168.0.0/16"]),
        Listen(host="10.0.0.5", port=8443, open_without_key=True),
    ],
)
def test_what_does_not_go_with_the_hosts_edge_is_refused(listen: Listen) -> None:
    edge = EdgeData.model_validate(EDGE)
    with pytest.raises(CatalogError, match=r"serving\.lan listens on .* Take host, networks"):
        edge_of(edge, None, entries(lan=listen))
    edge_of(edge, None, entries(lan=Listen(host="10.0.0.5", port=8443, networks=["10.0.0.0/8"])))


def test_two_first_keys_are_refused() -> None:
    with pytest.raises(CatalogError, match="name this one otherwise"):
        gpu_plan(api_key_file="~/key", edge={**EDGE, "keys": {"api-key": "~/other"}})


def test_an_engine_leaves_the_port_that_the_edge_takes() -> None:
    plan = with_edge(address="0.0.0.0", port=8000)
    assert {entry.listen.port for entry in plan.serving.values()} == {18000}


@pytest.mark.parametrize("host", ["::1", "127.0.0.2"])
def test_an_engine_is_where_the_edge_looks_for_it(host: str) -> None:
    _, moved = edge_of(
        EdgeData.model_validate(EDGE), None, entries(near=Listen(host=host), named=Listen(host="localhost"))
    )
    assert [entry.listen.host for entry in moved.values()] == ["127.0.0.1", "localhost"]


def test_paths_are_the_releases_own() -> None:
    plan = with_edge()
    assert plan.edge is not None
    release = plan.environments["vllm-0.16.0"].release
    assert routes(plan, plan.edge) == {"GET": ["/v1/models"], "POST": ["/v1/chat/completions", "/v1/completions"]}
    more = release.model_copy(update={"api": ["POST /v1/responses"]})
    environments = plan.environments["vllm-0.16.0"].__class__
    other = environments("vllm-0.16.0", more, "3.12", "", "")
    object.__setattr__(plan, "environments", {**plan.environments, "vllm-0.16.0": other})
    assert routes(plan, plan.edge)["POST"] == ["/v1/chat/completions", "/v1/completions", "/v1/responses"]


def test_counters_are_for_named_networks_alone() -> None:
    assert "acl SCRAPER src 10.0.9.1/32" in edge_files(with_edge())[CONFIGURATION]
    without = edge_files(with_edge(metrics_networks=[]))[CONFIGURATION]
    assert "metrics" not in without and "prometheus" not in without


def test_engines_of_different_models_are_told_apart_by_the_requests() -> None:
    plan = with_edge()
    assert "wait-for-body time 30s" not in edge_files(plan)[CONFIGURATION], "one model: every engine will do"
    named = plan.serving["vllm-base"].model_copy(update={"served_model_name": "kimi"})
    edge, _ = edge_of(plan.data.edge, None, {**plan.serving, "vllm-base": named})
    object.__setattr__(plan, "serving", {**plan.serving, "vllm-base": named})
    object.__setattr__(plan, "edge", edge)
    files = edge_files(plan)
    assert "wait-for-body time 30s" in files[CONFIGURATION]
    assert 'model = "kimi"' in files[f"{layout.EDGE}/engines.lua"]


def test_where_it_listens_is_read_from_its_configuration() -> None:
    """A rollback has no plan."""
    assert places(edge_files(with_edge())[CONFIGURATION]) == [("10.0.0.5", 8443)]
    assert places(edge_files(with_edge(address="fd00::5"))[CONFIGURATION]) == [("fd00::5", 8443)]


def test_keys_are_stored_as_digests() -> None:
    assert keys_map({"b": "ab" * 32, "a": "01" * 32}) == f"{'01' * 32} a\n{'AB' * 32} b\n"


def test_the_state_for_a_rollback_has_the_edge_and_no_secret() -> None:
    state = state_of(with_edge())
    assert {UNIT, CONFIGURATION} <= state["files"].keys() and "edge" in state["items"]
    assert state["id"] != state_of(with_edge(networks=[]))["id"]


def test_lines_to_talk_to_a_host_lead_to_its_edge() -> None:
    host = {**data("gpu"), "configurations": ["sglang-base"], "edge": EDGE}
    start, ask = talk_lines("kimi-1.example.com", host)
    assert "systemctl start" in start
    assert "https://kimi-1.example.com:8443/v1/chat/completions" in ask and "~/alice.key" in ask
    plain = talk_lines("kimi-1", {**host, "edge": {**EDGE, "tls": "none", "keys": {"a": "~/a"}}})[1]
    assert "http://10.0.0.5:8443/" in plain


def test_who_holds_the_edges_port_is_told() -> None:
    stranger = Server("0.0.0.0:8443", 7, "root", "nginx.service", "nginx")
    holds, clients = interruptions(with_edge(), [stranger])
    assert "listens on 0.0.0.0:8443 and is not ours" in holds
    assert "address 10.0.0.5:8443; an API key is needed" in clients
    assert not interruptions(with_edge(), [Server("10.0.0.5:8443", 8, "kimi-edge", layout.EDGE_UNIT, "haproxy")])


# --- Nothing foreign gets into the files ------------------------------------------------------------------------------

TEXTS = st.text(max_size=30) | st.sampled_from(
    [
        "10.0.0.5",
        "10.0.0.5\n    bind :1",
        "::1",
        "alice",
        "alice }",
        "10.0.0.0/8 } || { always_true",
        "%[env(HOME)]",
        "a#b",
    ]
)


@given(
    edge=st.fixed_dictionaries(
        {
            "address": TEXTS,
            "port": st.integers() | TEXTS,
            "tls": st.just("none") | st.fixed_dictionaries({"authority": st.lists(TEXTS, max_size=2)}),
            "keys": st.dictionaries(TEXTS, TEXTS, max_size=2),
            "networks": st.lists(TEXTS, max_size=2),
            "metrics_networks": st.lists(TEXTS, max_size=2),
        }
    )
)
def test_whatever_is_accepted_stays_a_word(edge: dict[str, Any]) -> None:
    """Each value is refused, or stands in the configuration as one word of harmless characters."""
    try:
        found = EdgeData.model_validate(edge)
    except ValidationError:
        return
    words = [found.address, *found.keys, *found.networks, *found.metrics_networks]
    words += found.tls.authority if found.tls != "none" else []
    assert all(re.fullmatch(r"[A-Za-z0-9._:/-]+", word) for word in words), words


@given(model=st.text(min_size=1))
def test_any_name_of_a_model_is_one_lua_string(model: str) -> None:
    plan = with_edge()
    named = plan.serving["vllm-base"].model_copy(update={"served_model_name": model})
    object.__setattr__(plan, "serving", {**plan.serving, "vllm-base": named})
    try:
        lua = edge_files(plan)[f"{layout.EDGE}/engines.lua"]
    except UnicodeEncodeError:
        return  # half a character; the catalogue has none (yaml_source)
    [found] = re.findall(r'vllm-base/started\.json", model = "([^"\n]*)" \},\n', lua)
    read = re.sub(r"\\(\d{3})", lambda match: chr(int(match[1])), found).encode("latin-1")
    assert read == model.encode()


GOLDEN = Path(__file__).parent / "golden_edge"
SHAPES: dict[str, dict[str, Any]] = {
    "tls": {"edge": EDGE, "configurations": ["vllm-base", "sglang-base"]},
    "taken-over": {"api_key_file": "/nonexistent", "catalogue_overlay": "network.yaml"},
}


@pytest.mark.parametrize("shape", SHAPES)
def test_files_are_as_written_down(shape: str) -> None:
    for path, text in edge_files(gpu_plan(**SHAPES[shape])).items():
        golden = GOLDEN / shape / Path(path).name
        assert text == golden.read_text(), "meant? `python -m tests.unit.test_edge` writes them anew"


if __name__ == "__main__":
    import os

    from tests.support.plans import INVENTORY

    os.environ["KIMI_RIG_INVENTORY"] = str(INVENTORY)
    for name, host in SHAPES.items():
        (GOLDEN / name).mkdir(parents=True, exist_ok=True)
        for path, text in edge_files(gpu_plan(**host)).items():
            (GOLDEN / name / Path(path).name).write_text(text)
