"""Every kind of mistake gives an error that names the node and the fix, and all of them come at once."""

import functools
from collections.abc import Sequence
from dataclasses import FrozenInstanceError
from typing import Any

import pytest

from penstock.core.calls.graph_plan import Const, Env, Lane
from penstock.core.errors import GraphError
from penstock.graphs.builder import Graph


def problems_of(graph):
    with pytest.raises(GraphError) as caught:
        graph.compile()
    return caught.value.problems


def the_problem_of(graph):
    [problem] = problems_of(graph)
    return problem


def source() -> int:
    return 1


def test_a_parameter_is_fed_by_the_node_of_its_name():
    graph = Graph()
    graph.node(source)

    @graph.node
    def double(source):
        return 2 * source

    plan = graph.compile()

    assert plan.names == ("source", "double")
    assert plan.predecessors == ((), (0,))


def test_a_decorated_function_stays_itself():
    graph = Graph()

    @graph.node(lane="io", retries=2)
    def fetch(url="x"):
        return url

    assert fetch("y") == "y"


def test_nodes_are_numbered_so_that_each_comes_after_what_it_needs():
    graph = Graph()
    graph.add(lambda last: last, name="first_written", inputs={"last": "b"})
    graph.add(lambda a: a, name="b", inputs={"a": "a"})
    graph.add(lambda: 1, name="a")

    assert graph.compile().names == ("a", "b", "first_written")


def test_a_node_that_feeds_two_parameters_of_another_is_waited_for_once():
    graph = Graph()
    graph.node(source)
    graph.add(lambda one, two: one + two, name="sum", inputs={"one": "source", "two": ["source", "source"]})

    plan = graph.compile()

    assert plan.predecessors == ((), (0,))
    assert plan.pending[:2] == (0, 1)


def test_a_plan_cannot_be_changed():
    graph = Graph()
    graph.node(source)
    plan = graph.compile()

    with pytest.raises(FrozenInstanceError):
        plan.names = ()
    with pytest.raises(TypeError):
        plan.index["other"] = 1


def test_a_plan_does_not_see_what_is_added_to_its_graph_later():
    graph = Graph()
    graph.node(source)
    plan = graph.compile()
    graph.add(source, name="another")

    assert len(plan) == 1
    assert len(graph.compile()) == 2


def test_the_lane_comes_from_the_function_unless_the_node_says_otherwise():
    graph = Graph()

    @graph.node
    async def waits(): ...

    @graph.node
    def computes(): ...

    @graph.node(lane="io")
    def reads(): ...

    @graph.node(lane="process")
    def crunches(): ...

    plan = graph.compile()

    lanes = {name: plan.lane(plan.index[name]) for name in plan.names}
    assert lanes == {"waits": Lane.IO, "computes": Lane.COMPUTE, "reads": Lane.IO, "crunches": Lane.PROCESS}


# Mistakes


def test_all_mistakes_are_reported_together():
    graph = Graph("broken")

    @graph.node(lane="oi", retries=-1)
    def fetch(urll): ...

    graph.add(source, name="url")
    graph.add(source, name="url")

    with pytest.raises(GraphError) as caught:
        graph.compile()

    kinds = [problem.kind for problem in caught.value.problems]
    assert sorted(kinds) == ["duplicate", "option", "option", "unknown input"]
    message = str(caught.value)
    assert message.startswith("graph 'broken' has 4 problems:")
    assert all(str(problem) in message for problem in caught.value.problems)


def test_an_empty_graph_is_a_mistake():
    assert the_problem_of(Graph()).kind == "empty"


def test_a_cycle_is_printed_as_its_path_in_the_direction_of_the_data():
    graph = Graph()
    graph.add(lambda c: c, name="a", inputs={"c": "c"})
    graph.add(lambda a: a, name="b", inputs={"a": "a"})
    graph.add(lambda b: b, name="c", inputs={"b": "b"})
    graph.add(lambda c: c, name="downstream", inputs={"c": "c"})

    problem = the_problem_of(graph)

    assert problem.kind == "cycle"
    assert "a -> b -> c -> a" in problem.text
    assert "take 'c' out of the inputs of 'a'" in problem.fix


def test_two_knots_are_two_problems():
    graph = Graph()
    graph.add(lambda x: x, name="a", inputs={"x": "b"})
    graph.add(lambda x: x, name="b", inputs={"x": "a"})
    graph.add(lambda x, y: x, name="self", inputs={"x": "self", "y": "a"})

    assert ["a -> b -> a" in str(p) or "self -> self" in str(p) for p in problems_of(graph)] == [True, True]


def test_a_parameter_that_nothing_feeds_suggests_the_likely_name():
    graph = Graph(env=("user_id",))

    @graph.node
    def profile(user_idd): ...

    problem = the_problem_of(graph)

    assert problem.node == "profile"
    assert "'user_idd' matches no node" in problem.text
    assert "did you mean 'user_id'?" in problem.fix
    assert "graph.env('user_idd')" in problem.fix


@pytest.mark.parametrize(
    ("wrong", "text", "fix"),
    [
        ("sourc", "there is no such node", "did you mean 'source'?"),
        ("zzz", "there is no such node", "Const('zzz')"),
        (Env("user"), "Env('user'), which is not declared", "graph.env('user')"),
        (3, "is given 3", "Const(3)"),
        (len, "which is no node", "add that function to the graph first"),
        (["source", "sourcee"], "there is no such node", "did you mean 'source'?"),
    ],
)
def test_an_input_that_does_not_exist_names_its_fix(wrong, text, fix):
    graph = Graph()
    graph.node(source)
    graph.add(lambda x: x, name="reader", inputs={"x": wrong})

    problem = the_problem_of(graph)

    assert (problem.node, problem.kind) == ("reader", "unknown input")
    assert text in problem.text
    assert fix in problem.fix


def test_an_input_for_a_parameter_that_the_function_lacks_is_a_mistake():
    graph = Graph()
    graph.node(source)
    graph.add(lambda left: left, name="reader", inputs={"left": "source", "rigth": "source"})
    graph.add(lambda: 1, name="nothing", inputs={"x": "source"})

    first, second = problems_of(graph)

    assert (first.node, first.kind) == ("reader", "arity")
    assert "'rigth'" in first.text
    assert "no parameters at all" in second.fix


def test_a_name_given_twice_is_a_mistake():
    graph = Graph(env=("x",))
    graph.node(source)
    graph.node(source)
    graph.add(source, name="x")

    assert [(p.node, p.kind) for p in problems_of(graph)] == [("source", "duplicate"), ("x", "duplicate")]


@pytest.mark.parametrize("fn", [lambda: 1, functools.partial(source)])
def test_a_function_without_a_name_needs_one(fn):
    graph = Graph()
    graph.node(fn)

    assert "name=" in the_problem_of(graph).fix


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"lane": "computee"}, "did you mean 'compute'?"),
        ({"lane": "gpu"}, "it is one of 'compute', 'io', 'process'"),
        ({"retries": -1}, "from 0 up"),
        ({"retries": 1.5}, "from 0 up"),
        ({"retries": True}, "from 0 up"),
        ({"retry_delay": -1}, "from 0 up"),
        ({"retry_on": "ValueError"}, "exception classes"),
        ({"timeout": 0}, "above 0"),
        ({"timeout": "5"}, "above 0"),
        ({"on_error": "skip_dependent"}, "did you mean 'skip_dependents'?"),
        ({"over": "items", "limit": 0}, "from 1 up"),
        ({"name": ""}, "not empty"),
        ({"inputs": ["source"]}, "inputs={"),
        ({"over": "items", "each": "itm"}, "did you mean 'item'?"),
    ],
)
def test_a_wrong_option_names_its_fix(options, word):
    graph = Graph()
    graph.node(source)
    graph.add(list, name="items")
    graph.add(lambda item=1: item, **{"name": "node", **options})

    problem = the_problem_of(graph)

    assert problem.node == (options.get("name", "node") or "''")
    assert word in problem.fix


def test_an_option_that_does_not_exist_is_refused_where_it_is_given():
    with pytest.raises(
        TypeError, match=r"node 'source': there is no option 'retires'; did you mean 'retries'\?"
    ):
        Graph().add(source, retires=3)


def test_an_async_def_cannot_compute_or_leave_the_process():
    graph = Graph()

    @graph.node(lane="process")
    async def fetch(): ...

    assert "make it a plain def" in the_problem_of(graph).fix


def test_a_function_that_yields_cannot_be_a_node():
    graph = Graph()

    @graph.node
    def lines():
        yield 1

    assert the_problem_of(graph).fix == "return a list instead"


@pytest.mark.parametrize("fn", [3, None])
def test_something_that_cannot_be_called_cannot_be_a_node(fn):
    graph = Graph()
    graph.add(fn, name="three")

    assert the_problem_of(graph).text == f"{fn!r} cannot be called"


def test_a_function_whose_parameters_cannot_be_read_needs_a_def():
    class Opaque:
        __signature__ = "not one"

        def __call__(self): ...

    graph = Graph()
    graph.add(Opaque(), name="opaque")

    assert "wrap the function in a def" in the_problem_of(graph).fix


def test_a_map_needs_a_parameter_for_its_item():
    graph = Graph()
    graph.add(lambda: [1], name="items")
    graph.add(lambda: 1, name="each", over="items")

    assert the_problem_of(graph).kind == "map"


# Types


class Money(float): ...


def makes_text() -> str:
    return ""


def makes_texts() -> list[str]:
    return []


def makes_int() -> int:
    return 1


def makes_bool() -> bool:
    return True


def makes_nothing() -> None: ...


def makes_maybe() -> int | None:
    return None


def makes_float() -> float:
    return 1.0


def makes_money() -> Money:
    return Money(1)


def makes_mapping() -> dict[str, int]:
    return {}


def makes_anything() -> Any: ...
def makes_unhinted(): ...
def makes_broken() -> "NoSuchName": ...  # type: ignore[name-defined]  # noqa: F821  # the point of the test


def takes_int(x: int): ...
def takes_float(x: float): ...
def takes_text(x: str): ...
def takes_maybe_text(x: str | None): ...
def takes_floats(x: Sequence[float]): ...
def takes_texts(x: Sequence[str]): ...
def takes_money(x: Money): ...
def takes_mapping(x: dict[str, str]): ...
def takes_object(x: object): ...


@pytest.mark.parametrize(
    ("made", "taken"),
    [
        (makes_text, takes_int),
        (makes_int, takes_text),
        (makes_nothing, takes_int),
        (makes_int, takes_maybe_text),
        (makes_texts, takes_floats),
        (makes_texts, takes_text),
        (makes_mapping, takes_mapping),
        (makes_mapping, takes_int),
    ],
)
def test_hints_that_contradict_each_other_are_a_mistake(made, taken):
    graph = Graph()
    graph.add(made, name="made")
    graph.add(taken, name="taken", inputs={"x": "made"})

    problem = the_problem_of(graph)

    assert (problem.node, problem.kind) == ("taken", "types")
    assert "'x' wants" in problem.text
    assert "node 'made' returns" in problem.text


@pytest.mark.parametrize(
    ("made", "taken"),
    [
        (makes_int, takes_float),
        (makes_bool, takes_int),
        (makes_maybe, takes_int),
        (makes_nothing, takes_maybe_text),
        (makes_money, takes_float),
        (makes_money, takes_money),
        (makes_float, takes_money),
        (makes_texts, takes_texts),
        (makes_anything, takes_int),
        (makes_unhinted, takes_int),
        (makes_broken, takes_int),
        (makes_text, takes_object),
    ],
)
def test_hints_that_may_fit_pass(made, taken):
    graph = Graph()
    graph.add(made, name="made")
    graph.add(taken, name="taken", inputs={"x": "made"})

    assert len(graph.compile()) == 2


def test_constants_and_the_environment_are_checked_too():
    graph = Graph(env={"day": str})
    graph.add(takes_int, name="a", inputs={"x": Const("7")})
    graph.add(takes_int, name="b", inputs={"x": Env("day")})
    graph.add(takes_int, name="c", inputs={"x": Const(7)})

    first, second = problems_of(graph)

    assert "gets the constant '7'" in first.text
    assert "Env('day') is str" in second.text


def test_two_readers_of_an_untyped_input_must_agree():
    graph = Graph(env=("x",))
    graph.add(takes_int, name="a")
    graph.add(takes_texts, name="b")

    assert the_problem_of(graph).node == "b"


def test_gathered_inputs_are_checked_one_by_one():
    graph = Graph()
    graph.add(makes_int, name="good")
    graph.add(makes_text, name="bad")
    graph.add(takes_floats, name="all", inputs={"x": ["good", "bad"]})

    assert "node 'bad' returns str" in the_problem_of(graph).text


def test_the_items_of_a_map_are_checked_and_its_result_is_a_list():
    graph = Graph()
    graph.add(makes_texts, name="texts")
    graph.add(takes_int, name="each", over="texts")
    graph.add(makes_int, name="number")
    graph.add(takes_text, name="letters", over="number")
    graph.add(takes_text, name="mapped", over="texts")
    graph.add(takes_int, name="reader", inputs={"x": "mapped"})

    each, letters, reader = problems_of(graph)

    assert "the items it maps over are str" in each.text
    assert "it maps over int" in letters.text
    assert "node 'mapped' returns list" in reader.text


def test_mapping_over_a_text_is_a_mistake():
    graph = Graph()
    graph.add(makes_text, name="text")
    graph.add(lambda letter: letter, name="each", over="text")

    assert "map over a list" in the_problem_of(graph).fix
