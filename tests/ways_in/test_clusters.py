"""Clusters on hand-made and random graphs, without TensorFlow running anything."""
from __future__ import annotations

import graphlib
from dataclasses import replace

import pytest
from hypothesis import given, note, settings
from hypothesis import strategies as st

from tf_stitch.graph.clusters import Found, NodeInfo, find
from tf_stitch.graph.control import Flow, contexts
from tf_stitch.options import Options


def node(name: str, *inputs: str, op: str = "Mul", why: str | None = None, controls: tuple[str, ...] = (),
         device: str = "", outputs: int = 1, **more) -> NodeInfo:
    refs = tuple((i.split(":")[0], int(i.split(":")[1]) if ":" in i else 0) for i in inputs)
    return NodeInfo(name, op, refs, controls, device, outputs, why, **more)


def left(name: str, *inputs: str, op: str = "MatMul", **more) -> NodeInfo:
    return node(name, *inputs, op=op, why="library", **more)


def source(name: str) -> NodeInfo:
    return node(name, op="Placeholder", why="fed", computes=False)


def members(found: Found) -> list[set[str]]:
    return [set(c.members) for c in found.clusters]


def check_acyclic(infos: list[NodeInfo], found: Found) -> None:
    """With every cluster contracted to one node, the graph can still be ordered."""
    unit = {i.name: i.name for i in infos}
    for c in found.clusters:
        unit.update(dict.fromkeys(c.members, c.root))
    taken = {n for c in found.clusters for n in c.members}
    graph = {i.name: {unit[s] for s, _ in i.inputs if not is_back(i.name, s)} | {unit[c] for c in i.controls}
             for i in infos if i.name not in found.removed and i.name not in taken}
    for c in found.clusters:
        graph[c.root] = {unit[s] for s, _ in c.inputs} | {unit[x] for x in c.controls}
        assert c.root not in graph[c.root]
    graphlib.TopologicalSorter(graph).prepare()


def is_back(target: str, name: str) -> bool:
    """The loop variables' way back in the graph that :func:`loop` makes."""
    return (target, name) in (("mx", "nx"), ("mi", "ni"))


def test_one_chain_is_one_cluster():
    found = find([source("x"), node("a", "x"), node("b", "a"), node("c", "b")], Options(), read=[("c", 0)])
    (c,) = found.clusters
    assert c.members == ("a", "b", "c")
    assert c.inputs == (("x", 0),)
    assert c.compute_ops == 3


def test_a_path_through_a_library_call_splits():
    infos = [source("x"), node("a", "x"), node("a2", "a"), left("m", "a2"), node("b", "m", "a2"), node("b2", "b")]
    found = find(infos, Options(), read=[("b2", 0)])
    assert members(found) == [{"a", "a2"}, {"b", "b2"}]
    assert found.clusters[0].outputs == (("a2", 0),)
    check_acyclic(infos, found)


def stacked_cells() -> list[NodeInfo]:
    """Two products whose results meet in ``join``; ``g1``, which rests on the first alone, feeds a third."""
    return [source("x"), source("y"), left("m1", "x"), left("m2", "y"), node("f1", "m1"), node("g1", "f1"),
            node("f2", "m2"), node("g2", "f2"), node("join", "g1", "g2"), node("end", "join"),
            left("m3", "g1"), left("m4", "end"), node("h3", "m3"), node("i3", "h3"), node("h4", "m4"), node("i4", "h4")]


def test_a_library_call_does_not_wait_for_a_stream_that_it_does_not_need():
    infos = stacked_cells()
    read = [("i3", 0), ("i4", 0)]
    found = find(infos, Options(target="host"), read=read)
    check_acyclic(infos, found)
    (first,) = [c for c in found.clusters if "g1" in c.members]
    assert set(first.members) == {"f1", "g1"}
    (second,) = [c for c in found.clusters if "g2" in c.members]
    assert {"join", "end"} <= set(second.members)
    gpu = find(infos, Options(target="cuda:sm_90"), read=read)
    assert {"f1", "g1", "f2", "g2", "join", "end"} in members(gpu)  # launches do not wait: one cluster


def test_streams_that_meet_before_any_library_call_stay_together():
    infos = [i for i in stacked_cells() if i.name not in ("m3", "h3", "i3")]
    found = find(infos, Options(target="host"), read=[("i4", 0)])
    assert {"f1", "g1", "f2", "g2", "join", "end"} in members(found)


def test_clusters_of_different_depth_merge_when_no_path_runs_outside():
    infos = [source("x"), source("y"), node("a", "x"), node("a2", "a"), left("m", "y"), node("b", "m", "a2")]
    found = find(infos, Options(), read=[("b", 0)])
    assert members(found) == [{"a", "a2", "b"}]


def test_a_control_edge_is_a_path():
    infos = [source("x"), node("a", "x"), node("a2", "a"), left("n", op="Print", controls=("a2",)),
             node("b", "a2", controls=("n",)), node("b2", "b")]
    found = find(infos, Options(), read=[("b2", 0)])
    assert members(found) == [{"a", "a2"}, {"b", "b2"}]
    assert found.clusters[1].controls == ("n",)
    check_acyclic(infos, found)


def test_devices_do_not_mix():
    infos = [source("x"), node("a", "x", device="/cpu:0"), node("a2", "a", device="/cpu:0"),
             node("b", "a2", device="/cpu:1"), node("b2", "b", device="/cpu:1"),
             node("c", "b2", "a", device="/cpu:0"), node("c2", "c", device="/cpu:0")]
    found = find(infos, Options(), read=[("c2", 0)])
    assert members(found) == [{"a", "a2"}, {"b", "b2"}, {"c", "c2"}]
    check_acyclic(infos, found)


def test_small_constants_and_shapes_are_copied():
    shape = dict(small_integer=True, symbolic=True)
    infos = [source("x"), source("y"), node("k", op="Const", small_const=True, computes=False),
             node("s", "x", op="Shape", computes=False, **shape), node("d", "s", "k", op="StridedSlice", **shape),
             node("a", "y", "d"), node("b", "a", "k"), left("m", "b"), node("c", "m", "d"), node("e", "c", "k")]
    found = find(infos, Options(), read=[("e", 0)])
    assert members(found) == [{"a", "b"}, {"c", "e"}]
    for c in found.clusters:
        assert c.copies == {"k", "s", "d"}
        assert ("x", 0) in c.inputs
    assert found.removed >= {"k", "s", "d"}


def test_a_shape_inside_another_cluster_is_handed_over_not_its_operand():
    shape = dict(small_integer=True, symbolic=True)
    infos = [source("x"), source("y"), node("a", "x"), node("a2", "a"),
             node("s", "a", op="Shape", computes=False, **shape), left("m", "a2"),
             node("b", "m", "s"), node("b2", "b", "y")]
    found = find(infos, Options(), read=[("b2", 0)])
    first, second = found.clusters
    assert "s" in first.members and ("s", 0) in first.outputs and ("a", 0) not in first.outputs
    assert ("s", 0) in second.inputs and "s" not in second.copies


def test_waiting_for_shape_arithmetic_is_waiting_for_what_it_reads():
    shape = dict(small_integer=True, symbolic=True)
    infos = [source("x"), node("s", "x", op="Shape", computes=False, **shape), node("d", "s", op="Prod", **shape),
             node("k", op="Const", small_const=True, computes=False, controls=("d",)), node("a", "x", "k"),
             node("b", "a")]
    found = find(infos, Options(), read=[("b", 0)])
    (c,) = found.clusters
    assert c.controls == ("x",)
    assert {"s", "d", "k"} <= found.removed


def test_originals_of_copies_stay_while_something_reads_them():
    infos = [source("x"), node("k", op="Const", small_const=True, computes=False), node("a", "x", "k"), node("b", "a"),
             left("m", "k")]
    assert "k" not in find(infos, Options(), read=[("b", 0)]).removed
    infos[-1] = left("m", "x")
    assert "k" in find(infos, Options(), read=[("b", 0)]).removed
    assert "k" not in find(infos, Options(), read=[("b", 0)], pinned=["k"]).removed


def test_a_kept_node_hands_on_every_output():
    infos = [source("x"), node("a", "x", outputs=3), node("b", "a:1")]
    (c,) = find(infos, Options(), keep=["a"], read=[("b", 0)]).clusters
    assert c.outputs == (("a", 0), ("a", 1), ("a", 2), ("b", 0))


def test_dead_code_of_a_function_is_no_cluster():
    assert not find([source("x"), node("a", "x"), node("b", "a")], Options(), read=[("x", 0)]).clusters


def test_what_nothing_needs_goes_where_it_may():
    infos = [source("x"), node("a", "x"), left("m", "a"), node("b", "m"), node("c", "m"),
             node("y", "x"), node("z", "y")]
    infos = [replace(i, pure=i.name != "x") for i in infos]
    found = find(infos, Options(), read=[("z", 0)], prune=True)
    assert members(found) == [{"y", "z"}] and not found.left
    assert found.removed == {"a", "m", "b", "c", "y", "z"}
    for needed in (dict(keep=["m"]), dict(pinned=["m"])):
        found = find(infos, Options(min_ops=1), read=[("z", 0)], prune=True, **needed)
        assert {"a"} in members(found) and "m" not in found.removed and {"b", "c"} <= found.removed
    effect = [replace(i, pure=i.pure and i.name != "c") for i in infos]
    assert not {"c", "m"} & find(effect, Options(), read=[("z", 0)], prune=True).removed
    assert "m" not in find(infos, Options(), read=[("z", 0)]).removed


def test_what_is_too_small_joins_a_cluster_beside_it():
    big = [source("x"), node("a", "x"), node("b", "a")]
    one = find([*big, node("n", "x"), left("m", "n", "b")], Options(), read=[("m", 0)])
    assert members(one) == [{"a", "b", "n"}]
    fed = find([*big, source("w"), node("n", "w"), left("m", "n", "b")], Options(), read=[("m", 0)])
    assert members(fed) == [{"a", "b", "n"}]
    # not what neither reads the same nor feeds the same
    assert members(find([*big, source("w"), node("n", "w"), left("m", "n"), left("l", "b")], Options(),
                        read=[("m", 0), ("l", 0)])) == [{"a", "b"}]
    # not what waits for the cluster, or the cluster for it
    waits = find([*big, left("m", "b"), node("n", "m", "x")], Options(), read=[("n", 0), ("b", 0)])
    assert members(waits) == [{"a", "b"}]
    # not what would wait for a library call, unless it is a few integers
    late = [source("x"), left("m", "x"), node("a", "m"), node("b", "a")]
    ends = [("b", 0), ("n", 0)]
    assert members(find([*late, node("n", "x")], Options(), read=ends)) == [{"a", "b"}]
    assert members(find([*late, node("n", "x", small_integer=True)], Options(), read=ends)) == [{"a", "b", "n"}]
    # two that are both too small stay two
    assert not find([source("x"), node("a", "x"), node("b", "x")], Options(), read=[("a", 0), ("b", 0)]).clusters


def test_on_a_gpu_what_does_not_wait_for_each_other_is_one_cluster():
    infos = [source("x"), source("y"), node("a", "x"), node("b", "a"), node("c", "y"), node("d", "c"),
             left("m", "b", op="Print"), node("e", "m"), node("f", "e")]
    read = [("d", 0), ("f", 0)]
    assert members(find(infos, Options(target="host"), read=read)) == [{"a", "b"}, {"c", "d"}, {"e", "f"}]
    gpu = find(infos, Options(target="cuda:sm_90"), read=read)
    assert members(gpu) == [{"a", "b", "c", "d"}, {"e", "f"}]
    check_acyclic(infos, gpu)


def test_on_a_gpu_new_values_of_variables_are_one_cluster():
    """A backward pass: each layer's update waits for its own call alone, and nothing for the updates."""
    infos = [source("x"), node("a", "x"), node("a2", "a")]
    for k in range(3):
        last = "a2" if not k else f"b{k - 1}"
        infos += [left(f"m{k}", last, op="Backprop"), node(f"u{k}", f"m{k}"), node(f"v{k}", f"u{k}"),
                  left(f"s{k}", f"v{k}", op="AssignVariableOp", outputs=0), left(f"b{k}", f"m{k}", op="Backprop")]
    found = find(infos, Options(target="cuda:sm_90"), read=[("b2", 0)])
    assert members(found) == [{"a", "a2"}, {f"{n}{k}" for n in "uv" for k in range(3)}]
    check_acyclic(infos, found)
    # what the function's end waits for is no reason to keep them apart
    one = [i for i in infos if i.op != "AssignVariableOp"]
    one.append(left("s", "v0", "v1", "v2", op="StitchedAssign", outputs=0))
    one.append(node("end", "a2", op="Identity", controls=("s",), computes=False))
    found = find(one, Options(target="cuda:sm_90"), read=[("b2", 0), ("end", 0)])
    assert {f"{n}{k}" for n in "uv" for k in range(3)} in members(found)
    check_acyclic(one, found)
    # a value that a later call waits for is no end of that call's cluster
    infos.append(left("m", "b2", op="Print", controls=("s0",)))
    infos += [node("e", "m"), node("f", "e")]
    found = find(infos, Options(target="cuda:sm_90"), read=[("f", 0)])
    check_acyclic(infos, found)
    assert not any({"e", "u0"} <= m for m in members(found))


def test_min_ops_and_counting():
    infos = [source("x"), node("a", "x"), node("r", "a", op="Reshape", computes=False)]
    found = find(infos, Options(), read=[("r", 0)])
    assert not found.clusters and "min_ops=2" in found.left[0].reason
    assert len(find(infos, Options(min_ops=1), read=[("r", 0)]).clusters) == 1


def test_a_cycle_that_is_no_loop_is_refused():
    with pytest.raises(ValueError, match="cycle"):
        find([node("a", "b"), node("b", "a")], Options())


# --- control flow ------------------------------------------------------------------------------------

def branch() -> list[NodeInfo]:
    """cond(p, x * 2 + 1, x - 1), then two more ops."""
    flow = dict(why="control flow", computes=False)
    return [source("x"), source("p"), node("sw", "x", "p", op="Switch", outputs=2, **flow),
            node("t", "sw:1"), node("t2", "t"), node("f", "sw:0"), node("f2", "f"),
            node("m", "f2", "t2", op="Merge", outputs=2, **flow), node("z", "m", "x"), node("z2", "z")]


def test_branches_do_not_mix():
    found = find(branch(), Options(), read=[("z2", 0)])
    assert sorted(map(sorted, members(found))) == [["f", "f2"], ["t", "t2"], ["z", "z2"]]
    check_acyclic(branch(), found)


def test_after_a_two_way_merge_everything_is_alive_again():
    flows = [Flow(i.name, i.op, i.inputs, i.controls) for i in branch()]
    found = contexts(flows, {f.name: f.op for f in flows})
    assert found["m"] == found["x"] == found["z2"]
    assert found["t2"] == found["t"] != found["f"]


def test_a_merge_of_one_branch_alone_is_a_condition_of_its_own():
    flows = [Flow("x", "Placeholder", (), ()), Flow("p", "Placeholder", (), ()), Flow("q", "Placeholder", (), ()),
             Flow("s", "Switch", (("x", 0), ("p", 0)), ()), Flow("u", "Switch", (("x", 0), ("q", 0)), ()),
             Flow("m", "Merge", (("s", 1), ("u", 0)), ())]
    found = contexts(flows, {f.name: f.op for f in flows})
    assert not found["m"].is_root and found["m"] != found["s"]


def loop() -> list[NodeInfo]:
    flow = dict(why="control flow", computes=False)
    enter = dict(op="Enter", frame_name="loop", **flow)
    two = dict(outputs=2, **flow)
    return [source("x"), source("i"), node("ex", "x", **enter), node("ei", "i", **enter),
            node("mx", "ex", "nx", op="Merge", **two), node("mi", "ei", "ni", op="Merge", **two),
            node("less", "mi"), node("lc", "less", op="LoopCond", **flow),
            node("sx", "mx", "lc", op="Switch", **two), node("si", "mi", "lc", op="Switch", **two),
            node("b", "sx:1", "si:1"), node("b2", "b"), node("inc", "si:1"),
            node("nx", "b2", op="NextIteration", **flow), node("ni", "inc", op="NextIteration", **flow),
            node("out", "sx:0", op="Exit", **flow), node("z", "out", "x"), node("z2", "z"), node("w", "x"),
            node("w2", "w", "z2")]


def test_loop_bodies_do_not_mix_with_what_is_outside():
    found = find(loop(), Options(), read=[("w2", 0)])
    assert {"b", "b2"} in [m - {"inc"} for m in members(found)]
    outside = {"z", "z2", "w", "w2"}
    assert all(m <= outside or not m & outside for m in members(found))
    assert any({"z", "z2"} <= m for m in members(found))


@pytest.mark.parametrize("target", ["host", "cuda:sm_90"])
def test_what_a_loop_reads_is_not_one_with_what_waits_for_the_loop(target):
    """The only way from ``w2`` to the loop's end is around the back edge; one op for both would wait for itself."""
    infos = [replace(i, inputs=(*i.inputs, ("ew", 0))) if i.name == "b" else i for i in loop()]
    infos.append(node("ew", "w2x", op="Enter", frame_name="loop", why="control flow", computes=False))
    infos += [node("wx", "x"), node("w2x", "wx"), node("y", "z2", "w2x"), node("y2", "y")]
    found = find(infos, Options(target=target), read=[("y2", 0), ("w2", 0)])
    before = {"wx", "w2x"}
    assert any(before <= m for m in members(found))
    assert not any(m & before and m & {"z", "z2", "y", "y2"} for m in members(found))


# --- random graphs -----------------------------------------------------------------------------------

@st.composite
def random_infos(draw) -> list[NodeInfo]:
    count = draw(st.integers(2, 24))
    infos: list[NodeInfo] = [source("n0")]
    for k in range(1, count):
        before = st.integers(0, k - 1)
        given_out = st.sampled_from([i.name for i in infos if i.outputs])
        inputs = draw(st.lists(given_out, min_size=1, max_size=3))
        controls = tuple(f"n{j}" for j in draw(st.lists(before, max_size=1)))
        kind = draw(st.sampled_from(["plain", "plain", "plain", "left", "shape", "chain", "const", "sink"]))
        device = draw(st.sampled_from(["", "", "", "/cpu:1"]))
        name = f"n{k}"
        if kind == "sink":
            infos.append(left(name, *inputs, op="AssignVariableOp", controls=controls, device=device, outputs=0))
        elif kind == "left":
            infos.append(left(name, *inputs, controls=controls, device=device))
        elif kind == "const":
            infos.append(node(name, op="Const", small_const=True, computes=False, controls=controls, device=device))
        elif kind == "shape":
            infos.append(node(name, inputs[0], op="Shape", computes=False, small_integer=True, symbolic=True,
                              controls=controls, device=device))
        else:
            chain = dict(op="Pack", small_integer=True, symbolic=True) if kind == "chain" else {}
            infos.append(node(name, *inputs, controls=controls, device=device, **chain))
    return infos


@settings(max_examples=300)
@given(random_infos(), st.data())
def test_random_graphs_stay_acyclic_and_complete(infos, data):
    names = [i.name for i in infos if i.outputs]
    read = [(n, 0) for n in data.draw(st.lists(st.sampled_from(names), max_size=3))] + [(names[-1], 0)]
    keep = data.draw(st.lists(st.sampled_from(names), max_size=2))
    infos = [replace(i, pure=i.why is None or i.op == "MatMul") for i in infos]
    prune = data.draw(st.booleans())
    options = Options(min_ops=data.draw(st.integers(1, 3)), target=data.draw(st.sampled_from(["host", "cuda:sm_90"])))
    found = find(infos, options, keep=keep, read=read, prune=prune)
    by_name = {i.name: i for i in infos}
    note("\n".join(f"{i.name} {i.op} {i.inputs} {i.controls} {i.device}" for i in infos))
    note("\n".join(f"{c.nodes} copies {set(c.copies)} reads {c.inputs} waits {c.controls}" for c in found.clusters))
    check_acyclic(infos, found)
    taken = [n for c in found.clusters for n in c.members]
    assert len(taken) == len(set(taken))
    made = {t for c in found.clusters for t in c.outputs}
    staying = set(by_name) - found.removed

    def available(ref):
        return ref in made or ref[0] in staying

    for c in found.clusters:
        inside = set(c.nodes)
        assert all(by_name[n].why is None for n in inside)
        assert len({by_name[n].device for n in c.members}) == 1
        assert all(t in c.inputs or t[0] in inside for n in inside for t in by_name[n].inputs)
        assert all(available(t) for t in c.inputs) and not {t[0] for t in c.inputs} & inside
        assert all(x in staying or x in taken for x in c.controls)
        order = [n for n in c.nodes]
        assert all(order.index(s) < order.index(n) for n in order for s, _ in by_name[n].inputs if s in inside)
    assert all(available(t) for n in staying for t in by_name[n].inputs)
    assert all(x in staying or x in taken for n in names for x in by_name[n].controls if n in staying or n in taken)
    assert all(available(t) for t in read)
    assert all(n in staying or all((n, p) in made for p in range(by_name[n].outputs)) for n in keep)
