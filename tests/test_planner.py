"""Plans for recorded Macs and published sizes; and the rules of choice on Macs and models made for the purpose."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from recorded_macs import recorded, renamed
from shapes import DEEPSEEK, KIMI, MISTRAL, MUSE, NAMES, shape

from cluster.cabling.topology import Topology, topology
from cluster.errors import BadSetting, NoPlan
from cluster.macs.hosts import Host
from cluster.plan.placement import Wishes
from cluster.plan.planner import Plan, as_values, plan, wishes_for
from cluster.vm.facts import VirtualMachine
from parallel.wire import LayerInfo, ModelInfo, TensorSize

GB = 1 << 30


def mac(name: str, gb: int = 64, chip: str = "Apple M4 Pro", **facts) -> Host:
    return Host(name, name, chip=chip, gpu_cores=20, memory_bytes=gb * GB, **facts)


def model(layers: int = 20, layer: float = 1.0, *, tensor=(), pipeline: str = "", **changes) -> ModelInfo:
    """A dense model whose layers weigh `layer` GB each; tensor parallel on the numbers of ranks in `tensor`."""
    size = int(layer * GB)
    sizes = [
        TensorSize(n, [], layers * size // n) if n in tensor else TensorSize(n, [f"{n} is odd"]) for n in range(2, 9)
    ]
    values = {
        "model_type": "made",
        "family": "made",
        "dtype": "bfloat16",
        "layers": [LayerInfo(size, size, [(1024, 0)], kv_heads=8)] * layers,
        "embedding": 0,
        "head": 0,
        "outside": 0,
        "tied": True,
        "hidden": 4096,
        "vocabulary": 1000,
        "widest": 8192,
        "wire": 8192,
        "context": 65536,
        "tensor": sizes,
        "pipeline": pipeline,
        "measured": True,
        "parameters": layers * size // 2,
    }
    return ModelInfo(**(values | changes))


def planned(hosts, info: ModelInfo, **wishes) -> Plan:
    found = hosts if isinstance(hosts, Topology) else topology(hosts)
    return plan(found, info, wishes_for(info, **({"context": 4096, "slots": 1} | wishes)))


def counts(found: Plan) -> dict[str, int]:
    return {rank.name: rank.stop - rank.start for rank in found.chosen.ranks}


def other(found: Plan, strategy: str):
    return next(option for option in found.others if option.strategy == strategy)


# ---------------------------------------------------------------- published sizes on recorded Macs


@pytest.mark.parametrize("name", NAMES)
def test_four_m3_ultra_hold_every_published_size_within_their_limits(name):
    info = shape(name)
    found = plan(topology(recorded("mesh4-double")), info, wishes_for(info))
    assert all(rank.budget.spare >= 0 for rank in found.chosen.ranks)
    assert found.chosen.strategy == {DEEPSEEK: "single", MISTRAL: "single"}.get(name, "tensor")


@pytest.mark.parametrize("name", NAMES)
def test_as_a_pipeline_the_larger_macs_take_more_layers(name):
    info = shape(name)
    found = plan(topology(recorded("mesh4-double")), info, wishes_for(info, parallel="pipeline"))
    memory = {host.name: host.memory_bytes for host in recorded("mesh4-double")}
    large = [count for host, count in counts(found).items() if memory[host] == 512 * GB]
    small = [count for host, count in counts(found).items() if memory[host] == 256 * GB]
    assert found.chosen.backend == "jaccl"
    assert min(large) > max(small)
    assert sum(large) + sum(small) == len(info.layers)


@pytest.mark.parametrize("name", NAMES)
def test_two_minis_are_told_what_is_missing_and_what_would_make_it_fit(name):
    info = shape(name)
    with pytest.raises(NoPlan) as told:
        plan(topology(recorded("mesh2")), info, wishes_for(info))
    for words in ("One Mac:", "Tensor parallel:", "Pipeline:", "mini-a", "mini-b", "needs", "has 51.5 GB", "short by"):
        assert words in told.value.message
    assert "more Macs like mini-a" in told.value.hint


def test_a_ring_of_cables_carries_the_pipeline_in_its_order():
    info = shape(MISTRAL)
    found = plan(topology(recorded("ring5")), info, wishes_for(info, context=4096))
    assert found.chosen.backend == "jaccl-ring"
    cabled = topology(recorded("ring5"))
    for a, b in zip(found.hosts, found.hosts[1:], strict=False):
        assert cabled.rdma_between(a, b)


def test_a_mac_that_can_never_do_rdma_is_left_out_and_told_why():
    info = shape(MUSE)
    found = plan(topology(recorded("mixed")), info, wishes_for(info))
    assert (found.chosen.strategy, found.chosen.backend) == ("pipeline", "jaccl")
    assert [(name, "Thunderbolt 4" in why) for name, why in found.left_out] == [("old", True)]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("cluster", "name"), [("mesh4-double", KIMI), ("ring5", MISTRAL), ("mixed", MUSE)])
@pytest.mark.parametrize("parallel", ["auto", "pipeline"])
def test_a_plan_does_not_depend_on_names_and_order(cluster, name, parallel, seed):
    info = shape(name)

    def essence(hosts):
        found = plan(topology(hosts), info, wishes_for(info, parallel=parallel, context=4096))
        memory = {host.name: host.memory_bytes for host in hosts}
        ranks = [(memory[rank.name], rank.start, rank.stop) for rank in found.chosen.ranks]
        return found.chosen.strategy, found.chosen.backend, ranks

    assert essence(renamed(recorded(cluster), seed).hosts) == essence(recorded(cluster))


# ---------------------------------------------------------------- the order of choice


def test_a_model_that_fits_on_one_mac_goes_on_the_fastest_that_holds_it():
    found = planned([mac("slow", 128, "Apple M1"), mac("fast", 64, "Apple M4 Max"), mac("tiny", 8)], model())
    assert (found.chosen.strategy, found.chosen.ranks[0].name) == ("single", "fast")
    assert {name for name, _ in found.left_out} == {"slow", "tiny"}
    assert "fits on one Mac" in other(found, "pipeline").why_not


def test_a_pipeline_over_tcp_is_what_is_left_without_cables():
    found = planned([mac("a"), mac("b")], model(60, tensor=(2,)))
    assert (found.chosen.strategy, found.chosen.backend) == ("pipeline", "ring")
    assert "no RDMA between a and b (no cable)" in other(found, "tensor").why_not


def test_rank_0_has_the_last_layers_and_every_link_carries_one_hidden_state():
    found = planned([mac("a"), mac("b"), mac("c")], model(90))
    assert [rank.rank for rank in found.chosen.ranks] == [0, 1, 2]
    assert found.chosen.ranks[0].stop == 90
    assert found.chosen.ranks[-1].start == 0
    assert [(link.sender, link.receiver) for link in found.chosen.traffic] == [(2, 1), (1, 0)]
    assert {link.bytes_per_token for link in found.chosen.traffic} == {8192}


def test_unequal_chips_are_no_tensor_group_unless_asked_for():
    hosts = [
        replace(host, chip=f"Apple {chip}") for host, chip in zip(recorded("mesh2"), ("M4 Pro", "M4 Max"), strict=True)
    ]
    info = model(60, tensor=(2,))
    found = planned(hosts, info)
    assert found.chosen.strategy == "pipeline"
    assert "equal chips" in other(found, "tensor").why_not
    forced = planned(hosts, info, parallel="tensor")
    assert forced.chosen.strategy == "tensor"
    assert any("chips differ" in warning for warning in forced.warnings)


def test_tensor_parallel_takes_as_many_ranks_as_divide():
    hosts = recorded("mesh4-double")
    assert len(planned(hosts, model(600, tensor=(2, 3)), context=64).chosen.ranks) == 3


def test_more_macs_are_not_taken_than_make_it_faster():
    slow = [mac(f"m1-{i}", 32, "Apple M1") for i in range(2)]
    found = planned([mac("a", 128, "Apple M3 Ultra"), mac("b", 128, "Apple M3 Ultra"), *slow], model(150, 1.0))
    assert set(counts(found)) == {"a", "b"}


def test_a_guest_is_only_a_stage_over_tcp():
    guest = VirtualMachine("VirtualMac2,1", "", "M4 Pro", ("hw.model is VirtualMac2,1",))
    hosts = [mac("a"), mac("guest", virtual=guest)]
    assert planned(hosts, model(60)).chosen.backend == "ring"
    with pytest.raises(NoPlan, match="virtual machine"):
        planned(hosts, model(60, tensor=(2,)), parallel="tensor", backend="ring")


def test_a_model_that_cannot_be_a_pipeline_says_so():
    with pytest.raises(NoPlan, match="hands on several tensors"):
        planned([mac("a"), mac("b")], model(60, pipeline="hands on several tensors"))


def test_a_much_faster_way_than_the_chosen_one_is_told():
    info = shape(MISTRAL)
    found = plan(topology(recorded("mesh4-double")), info, wishes_for(info))
    assert found.chosen.strategy == "single"
    assert any("--parallel tensor" in warning for warning in found.warnings)


# ---------------------------------------------------------------- memory as a sum


def test_the_sum_of_a_host_adds_up_and_counts_what_lives_there():
    info = msgspec.structs.replace(model(40, 1.0), embedding=3 * GB, head=2 * GB, outside=7, tied=False)
    found = planned([mac("a"), mac("b")], info, context=2048, slots=3)
    last, first = found.chosen.ranks
    layers = {rank.rank: rank.stop - rank.start for rank in found.chosen.ranks}
    assert first.budget.weights == layers[1] * GB + 3 * GB
    assert last.budget.weights == layers[0] * GB + 2 * GB + 7
    assert last.budget.kv == layers[0] * 3 * 2048 * 1024
    for rank in (first, last):
        budget = rank.budget
        assert budget.needs == budget.weights + budget.kv + budget.activations + budget.reserve
        assert budget.limit == int(64 * GB * 0.75)
        assert budget.spare == budget.limit - budget.needs


def test_a_tied_table_is_held_by_both_ends_of_a_pipeline_and_once_on_one_mac():
    info = msgspec.structs.replace(model(20, 1.0), embedding=2 * GB)
    alone = planned([mac("a")], info)
    assert alone.chosen.ranks[0].budget.weights == 22 * GB
    both = planned([mac("a"), mac("b")], info, parallel="pipeline")
    assert sum(rank.budget.weights for rank in both.chosen.ranks) == 24 * GB


def test_context_and_slots_decide_whether_it_fits():
    info = model(30, 1.0)
    assert planned([mac("a")], info, context=4096, slots=4).chosen.strategy == "single"
    with pytest.raises(NoPlan) as told:
        planned([mac("a")], info, context=65536, slots=16)
    assert "--context 16384" in told.value.hint
    assert "--slots 7" in told.value.hint


def test_fewer_bits_and_a_higher_limit_and_a_larger_mac_are_offered_where_they_help():
    with pytest.raises(NoPlan) as told:
        planned([mac("a")], model(46, 1.0))
    for words in (
        "a version with 8 bits",
        "one Mac with 96 GB",
        "1 more Mac like a",
        "with N 57344 on a",
    ):
        assert words in told.value.hint


def test_force_places_what_does_not_fit_and_says_by_how_much_it_is_short():
    found = planned([mac("a"), mac("b")], model(100, 1.0), force=True)
    assert min(rank.budget.spare for rank in found.chosen.ranks) < 0
    assert any("short by" in warning for warning in found.warnings)


def test_memory_that_is_not_free_now_is_a_warning():
    found = planned([mac("a", available_bytes=10 * GB)], model())
    assert any("close what runs there" in warning for warning in found.warnings)


def test_a_mac_of_unknown_memory_holds_nothing():
    with pytest.raises(NoPlan):
        planned([mac("a", 0)], model(1, 0.1))


# ---------------------------------------------------------------- what the user says


def test_a_split_is_in_the_order_of_ranks():
    found = planned([mac("a"), mac("b")], model(40), split=(15, 25))
    assert [(rank.name, rank.start, rank.stop) for rank in found.chosen.ranks] == [("a", 25, 40), ("b", 0, 25)]


def test_a_split_that_does_not_fit_is_refused_unless_forced():
    with pytest.raises(NoPlan, match="short by"):
        planned([mac("a"), mac("b")], model(60), split=(59, 1))
    assert counts(planned([mac("a"), mac("b")], model(60), split=(59, 1), force=True)) == {"a": 59, "b": 1}


@pytest.mark.parametrize(
    ("wishes", "words"),
    [
        ({"split": (10, 11)}, "20 layers"),
        ({"split": (20,)}, "two ranks or more"),
        ({"split": (20, 0)}, "at least one"),
        ({"split": (5, 5, 10)}, "3 ranks, but there are 2 Macs"),
        ({"split": (10, 10), "parallel": "tensor"}, "not for --parallel tensor"),
        ({"parallel": "both"}, "--parallel must be"),
        ({"backend": "mpi"}, "--backend must be"),
        ({"context": 10**6}, "more than the 65536 tokens"),
    ],
)
def test_wishes_that_contradict_the_model_are_refused(wishes, words):
    with pytest.raises(BadSetting, match=words):
        planned([mac("a"), mac("b")], model(), **wishes)


def test_a_backend_that_the_cables_do_not_allow_is_refused_with_the_reason():
    with pytest.raises(NoPlan, match=r"no RDMA between a and b \(no cable\)"):
        planned([mac("a"), mac("b")], model(), parallel="pipeline", backend="jaccl")


def test_the_usual_wishes_are_the_models_context_within_reason():
    assert wishes_for(model()) == Wishes(context=32768, slots=4)
    assert wishes_for(model(context=8192)).context == 8192


def test_the_plan_as_json_has_the_derived_sums_and_no_layers():
    values = as_values(planned([mac("a"), mac("b")], model(60)))
    rank = values["chosen"]["ranks"][0]
    assert rank["budget"]["needs"] + rank["budget"]["spare"] == rank["budget"]["limit"]
    assert values["info"]["layers"] == 60
    assert msgspec.json.encode(values)


def test_a_plan_and_its_refusal_say_which_host_is_a_virtual_machine():
    guest = mac("guest", virtual=VirtualMachine("VirtualMac2,1", "Apple Paravirtual device", "", ("seen",)))
    assert any("guest is a virtual machine" in warning for warning in planned([guest], model()).warnings)
    with pytest.raises(NoPlan, match="guest is a virtual machine"):
        planned([guest], model(400))
