"""Hostfiles: each fault has its message, all at once; what is written is what mlx reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_launch import accepted_by_mlx

from cluster.cabling.hostfile import HostEntry, Hostfile, check, dump, notes, parse, read, write
from cluster.errors import HostfileInvalid, HostfileUnreadable, HostfileUnwritable

EXAMPLES = sorted((Path(__file__).parent.parent / "hostfiles").glob("*.json"))


def host(ssh: Any, ips: Any = (), rdma: Any = ()) -> dict[str, Any]:
    return {"ssh": ssh, "ips": list(ips) if isinstance(ips, tuple) else ips, "rdma": list(rdma)}


def jaccl(*hosts: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"backend": "jaccl", "hosts": list(hosts), **more}


def faults(data: Any) -> list[str]:
    try:
        parse(data if isinstance(data, str) else json.dumps(data), "hosts.json")
    except HostfileInvalid as error:
        return list(error.faults)
    return []


M1, M2 = host("m1", ("10.0.1.31",), (None, "rdma_en4")), host("m2", (), ("rdma_en3", None))


def mesh_of(n: int, skip: tuple[int, int] | None = None, cables: int = 1, **more: Any) -> dict[str, Any]:
    """n hosts, every two joined but `skip`; every host has a device of its own for every cable."""

    def cell(i: int, j: int) -> Any:
        if i == j or (skip and {i, j} == set(skip)):
            return None
        names = [f"rdma_en{j * 10 + k}" for k in range(cables)]
        return names if cables > 1 else names[0]

    rows = [[cell(i, j) for j in range(n)] for i in range(n)]
    return jaccl(*(host(f"m{i + 1}", (f"10.0.1.{i + 1}",), tuple(row)) for i, row in enumerate(rows)), **more)


FAULTS: list[tuple[Any, str]] = [
    ("", "line 1 column 1: not JSON (Expecting value)"),
    ('{"hosts": [\n1,\n]}', "line 3 column 1: not JSON (Expecting value)"),
    ([], "no hosts"),
    ({}, "no hosts"),
    ({"hosts": None}, "no hosts"),
    ({"hosts": 3}, '"hosts" must be a list'),
    (7, 'must be a list of hosts, or an object with "hosts"'),
    ('{"hosts": [], "hosts": []}', 'the key "hosts" stands twice'),
    (jaccl(M1, M2, foo=1), 'unknown key "foo" (known: backend, envs, hosts)'),
    (jaccl(M1, {**M2, "port": 1}), 'host m2: unknown key "port" (known: ssh, ips, rdma)'),
    ({"backend": "jacl", "hosts": [M1, M2]}, 'backend "jacl": did you mean "jaccl"?'),
    ({"backend": "x", "hosts": [M1]}, 'backend "x": it is one of ring, jaccl, jaccl-ring, nccl'),
    ({"backend": 3, "hosts": [M1]}, "backend 3: it is one of ring, jaccl, jaccl-ring, nccl"),
    (jaccl(M1, M2, envs="A=1"), 'envs must be a list of "NAME=VALUE"; got "A=1"'),
    (jaccl(M1, M2, envs=["A"]), 'envs must be a list of "NAME=VALUE"; got "A" in it'),
    (jaccl(M1, M2, envs=["A=1", "A=2"]), "envs: A is set twice"),
    (jaccl(M1, M2, envs=["MLX_RANK=1"]), "envs: MLX_RANK is set by the launcher"),
    (jaccl(M1, M2, envs=["JACCL_RING=1"]), "envs: JACCL_RING is set by the launcher"),
    (jaccl(M1, {"ips": [], "rdma": ["rdma_en3", None]}), 'host 2: "ssh" is missing'),
    (
        jaccl(M1, {**M2, "ssh": "-oX=y"}),
        'host 2: "ssh" must be a host name or address; got "-oX=y"',
    ),
    (jaccl(M1, "m2"), 'host 2 must be an object with "ssh", "ips" and "rdma"; got "m2"'),
    (jaccl({**M1, "ips": "10.0.0.1"}, M2), 'host m1: "ips" must be a list of addresses in quotes; got "10.0.0.1"'),
    (jaccl(M1, {**M1, "rdma": ["rdma_en3", None]}), 'hosts 1 and 2 are both "m1": one rank per Mac with jaccl'),
    (jaccl(host("m1", ("10.0.1.1",), (None,))), "jaccl needs at least 2 hosts; leave the backend out to run on one"),
    (jaccl({**M1, "ips": []}, M2), 'host m1 (rank 0): "ips" is empty; the others need an IPv4 address of rank 0'),
    (jaccl({**M1, "ips": ["127.0.0.1"]}, M2), "host m1 (rank 0): 127.0.0.1 cannot be reached from m2"),
    (jaccl({**M1, "ips": ["169.254.3.4"]}, M2), "host m1 (rank 0): 169.254.3.4 cannot be reached from m2"),
    (jaccl({**M1, "ips": ["m1.local"]}, M2), 'host m1 (rank 0): "m1.local" is no IPv4 address'),
    (jaccl({**M1, "ips": ["fe80::1"]}, M2), 'host m1 (rank 0): "fe80::1" is no IPv4 address'),
    (jaccl({**M1, "ips": ["0.0.0.0"]}, M2), "host m1 (rank 0): 0.0.0.0 is not the address of one host"),
    (jaccl(M1, M2, host("m3", (), (None, None, None))), 'host m2: "rdma" has 2 entries for 3 hosts'),
    (jaccl({**M1, "rdma": ["rdma_en2", "rdma_en4"]}, M2), 'host m1: "rdma" entry 1 is m1 itself and must be null'),
    (jaccl({**M1, "rdma": None}, M2), 'host m1: "rdma" must be a list with an entry per host; got null'),
    (
        jaccl({**M1, "rdma": [None, 3]}, M2),
        'host m1: "rdma" entry 2 must be null, a device or a list of devices; got 3',
    ),
    (
        jaccl({**M1, "rdma": [None, []]}, M2),
        'host m1: "rdma" entry 2 is an empty list; write null where there is no cable',
    ),
    (jaccl({**M1, "rdma": [None, ""]}, M2), 'host m1 -> m2: "" is not an RDMA device'),
    (jaccl({**M1, "rdma": [None, "en2"]}, M2), 'host m1 -> m2: "en2" is not an RDMA device (did you mean "rdma_en2"?)'),
    (
        jaccl({**M1, "rdma": [None, ["rdma_en4", "rdma_en4"]]}, M2),
        "m1: rdma_en4 is listed twice; a port has one cable",
    ),
    (jaccl(M1, {**M2, "rdma": [None, None]}), "m1 lists rdma_en4 for m2, but m2 lists nothing for m1"),
    (jaccl({**M1, "rdma": [None, ["rdma_en2", "rdma_en4"]]}, M2), "m1 -> m2 has 2 cables, m2 -> m1 has 1"),
    (
        mesh_of(4, skip=(0, 3)),
        "m1 and m4 have no cable: a mesh needs every pair; use jaccl-ring in the order m1, m2, m4, m3, or add a cable",
    ),
    (mesh_of(3, skip=(0, 2)), "m1 and m3 have no cable: a mesh needs every pair; add a cable"),
    (mesh_of(9), "a jaccl mesh takes at most 8 Macs (9 given); use jaccl-ring"),
    (mesh_of(2, cables=5) | {"backend": "jaccl-ring"}, "m1 -> m2: jaccl-ring uses at most 4 cables per link (5 given)"),
    (
        mesh_of(4, skip=(1, 2)) | {"backend": "jaccl-ring"},
        "jaccl-ring: m2 (rank 1) and m3 (rank 2) are neighbours but have no cable; a working order is m1, m2, m4, m3",
    ),
    (
        mesh_of(3, skip=(1, 2)) | {"backend": "jaccl-ring"},
        "jaccl-ring: m2 (rank 1) and m3 (rank 2) are neighbours but have no cable; no other order works either: "
        "add a cable",
    ),
    ([host("m1", ("10.0.1.1",)), host("m2")], 'host m2: "ips" is empty; the ring needs an address of every host'),
    ([host("m1", ("10.0.1.1",)), host("m2", ("127.0.0.1",))], "host m2 (rank 1): 127.0.0.1 cannot be reached from m1"),
    ([host("m1", ("10.0.1.1",)), host("m2", ("10.0.1.1",))], "hosts m1 and m2 both have 10.0.1.1"),
    (
        [host("m1", ("10.0.1.1",)), host("m1", ("10.0.1.2",))],
        'hosts 1 and 2 are both "m1": one rank per Mac, unless all are 127.0.0.1',
    ),
    ([host("m1", ("127.0.0.1",)), host("m2", ("127.0.0.1",))], "host m1 (rank 0): 127.0.0.1 cannot be reached from m2"),
]


@pytest.mark.parametrize(("data", "message"), FAULTS, ids=[message[:60] for _, message in FAULTS])
def test_each_fault_is_told_by_host_and_field(data: Any, message: str) -> None:
    assert message in faults(data)


def test_a_device_with_two_cables_is_told() -> None:
    data = mesh_of(3)
    data["hosts"][0]["rdma"][2] = data["hosts"][0]["rdma"][1]
    assert faults(data) == ["m1: rdma_en10 is listed for m2 and for m3; a port has one cable"]


def test_links_of_a_ring_with_different_numbers_of_cables_are_told() -> None:
    data = mesh_of(3, cables=2) | {"backend": "jaccl-ring"}
    data["hosts"][0]["rdma"][1] = data["hosts"][0]["rdma"][1][:1]
    data["hosts"][1]["rdma"][0] = data["hosts"][1]["rdma"][0][:1]
    (fault,) = faults(data)
    assert fault.startswith("jaccl-ring needs the same number of cables on every link: m1-m2 has 1, m2-m3 has 2")
    assert fault.endswith("list 1 on each")


def test_all_faults_are_told_at_once() -> None:
    data = jaccl({"ips": 3, "rdma": [None, "en2"]}, {**M2, "rdma": 5}, envs=["A"], foo=1, backend="jacl")
    assert len(faults(data)) == 7


def test_the_error_names_the_file_and_its_faults(tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    file.write_text("[]")
    with pytest.raises(HostfileInvalid, match=r"mine\.json: no hosts"):
        read(file)


LOCAL = host("127.0.0.1", ("127.0.0.1",))
VALID: list[Any] = [
    [LOCAL, LOCAL, LOCAL],
    {"backend": "ring", "hosts": [LOCAL, LOCAL]},
    {"backend": "nccl", "hosts": [LOCAL, LOCAL, LOCAL, LOCAL]},
    {"backend": "nccl", "hosts": [host("gpu", ("10.0.0.5",)), host("gpu", ("10.0.0.5",))]},
    [{"ssh": "m1"}],
    [host("m1", ("10.0.1.1",)), host("m2", ("10.0.1.2", "10.0.2.2"))],
    jaccl(M1, M2, envs=["MLX_METAL_FAST_SYNCH=1"]),
    jaccl({**M1, "ips": ["169.254.3.4"]}, {**M2, "ips": ["169.254.3.5"]}),
    mesh_of(8),
    mesh_of(4, cables=2),
    mesh_of(9) | {"backend": "jaccl-ring"},
    mesh_of(4, skip=(0, 2)) | {"backend": "jaccl-ring"},
]


@pytest.mark.parametrize("data", VALID, ids=[json.dumps(data)[:50] for data in VALID])
def test_what_is_right_has_no_faults_survives_a_round_trip_and_is_taken_by_mlx(data: Any, tmp_path: Path) -> None:
    hostfile = parse(json.dumps(data), "hosts.json")
    assert check(hostfile) == []
    file = tmp_path / "hosts.json"
    write(hostfile, file)
    assert read(file) == hostfile
    assert accepted_by_mlx(file) == ""


@pytest.mark.parametrize("file", EXAMPLES, ids=[file.name for file in EXAMPLES])
def test_every_example_is_right_and_taken_by_mlx(file: Path) -> None:
    assert dump(read(file)) == file.read_text()
    assert accepted_by_mlx(file) == ""


def test_the_examples_are_described() -> None:
    text = (EXAMPLES[0].parent / "README.md").read_text()
    assert [file.name for file in EXAMPLES if f"`{file.name}`" not in text] == []


def test_a_mesh_with_uneven_links_is_no_fault_but_noted() -> None:
    data = mesh_of(3, cables=2)
    data["hosts"][0]["rdma"][2] = data["hosts"][0]["rdma"][2][:1]
    data["hosts"][2]["rdma"][0] = data["hosts"][2]["rdma"][0][:1]
    assert notes(parse(json.dumps(data), "x")) == ["only 1 cable per link is used: m1-m3 has no more"]


def test_a_vpn_address_and_ignored_rdma_are_noted() -> None:
    vpn = jaccl({**M1, "ips": ["100.71.2.3"]}, M2)
    assert "VPN" in notes(parse(json.dumps(vpn), "x"))[0]
    ring = [{**M1, "ips": ["10.0.0.1"]}, {**M2, "ips": ["10.0.0.2"]}]
    assert '"rdma" is ignored' in notes(parse(json.dumps(ring), "x"))[0]


def test_a_missing_file_a_folder_and_no_text_are_told(tmp_path: Path) -> None:
    with pytest.raises(HostfileUnreadable, match="No such file"):
        read(tmp_path / "none.json")
    with pytest.raises(HostfileUnreadable, match="directory"):
        read(tmp_path)
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(HostfileInvalid, match="not UTF-8"):
        read(tmp_path / "bytes.json")


def test_a_byte_order_mark_is_no_fault(tmp_path: Path) -> None:
    file = tmp_path / "bom.json"
    file.write_bytes(b"\xef\xbb\xbf" + dump(Hostfile((HostEntry("m1"),))).encode())
    assert read(file).hosts[0].ssh == "m1"


def test_deep_nesting_is_told_not_a_traceback() -> None:
    assert faults("[" * 100_000) == ["not a hostfile: nested too deeply"]


def test_what_cannot_be_written_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    with pytest.raises(HostfileUnwritable, match="No such file"):
        write(Hostfile((HostEntry("m1"),)), tmp_path / "missing" / "hosts.json")
    target = tmp_path / "hosts.json"
    target.mkdir()  # a folder cannot be replaced by a file
    with pytest.raises(HostfileUnwritable):
        write(Hostfile((HostEntry("m1"),)), target)
    assert list(tmp_path.iterdir()) == [target]


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 300)
    | st.sampled_from(["", "m1", "10.0.0.1", "rdma_en2", "jaccl", "A=1"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["hosts", "backend", "envs", "ssh", "ips", "rdma", "x"]), inner, max_size=4)
    ),
    max_leaves=25,
)


@settings(deadline=None, max_examples=300)
@given(JSON)
def test_any_json_is_read_or_refused_with_reasons(data: Any) -> None:
    try:
        hostfile = parse(json.dumps(data), "hosts.json")
    except HostfileInvalid as error:
        assert error.faults
    else:
        assert parse(dump(hostfile), "again") == hostfile
