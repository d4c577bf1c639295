"""The order in which implementations are tried, and what is reported when none fits."""

import logging

import pytest

from pallas_kernels.dispatch import dispatch, recorded, summary


def decline(*args, **kwargs):
    raise NotImplementedError("needs another device")


def fail(*args, **kwargs):
    raise ZeroDivisionError("a fault")


def named(name):
    return lambda *args, **kwargs: (name, args, kwargs)


def test_default_takes_the_first_that_accepts():
    implementations = {"fast": decline, "slow": named("slow"), "last": fail}
    assert dispatch("op", implementations, None, 1, 2, key=3) == ("slow", (1, 2), {"key": 3})


def test_sequence_gives_its_own_order():
    implementations = {"a": named("a"), "b": named("b"), "c": decline}
    assert dispatch("op", implementations, ("c", "b", "a"))[0] == "b"
    assert dispatch("op", implementations, ["a"])[0] == "a"


def test_one_name_never_falls_back():
    with pytest.raises(NotImplementedError, match="another device"):
        dispatch("op", {"fast": decline, "slow": named("slow")}, "fast")
    with pytest.raises(NotImplementedError, match="another device"):
        dispatch("op", {"fast": decline, "slow": named("slow")}, ("fast",))


def test_a_fault_is_not_a_refusal():
    with pytest.raises(ZeroDivisionError):
        dispatch("op", {"broken": fail, "slow": named("slow")}, None)


def test_all_refusals_are_reported_together():
    with pytest.raises(ExceptionGroup, match="my op") as caught:
        dispatch("my op", {"a": decline, "b": decline}, None)
    group = caught.value
    assert [type(error) for error in group.exceptions] == [NotImplementedError] * 2
    assert [error.__notes__ for error in group.exceptions] == [
        ["my op: implementation 'a'"],
        ["my op: implementation 'b'"],
    ]


@pytest.mark.parametrize("requested", ["fats", ("fats",), ("fats", "lost")])
def test_unknown_names(requested):
    with pytest.raises(ValueError, match="my op: no implementation .*'fats'.*; there is slow, b"):
        dispatch("my op", {"slow": fail, "b": fail}, requested)


def test_a_sequence_passes_over_names_that_the_op_lacks():
    implementations = {"fast": named("fast"), "slow": named("slow")}
    assert dispatch("op", implementations, ("another", "slow", "fast"))[0] == "slow"
    with pytest.raises(NotImplementedError, match="another device"):
        dispatch("op", {"fast": decline}, ("another", "fast"))


def test_empty_sequence():
    with pytest.raises(ValueError, match="my op: no implementation"):
        dispatch("my op", {"slow": named("slow")}, ())


def test_choice_is_logged_once(caplog):
    with caplog.at_level(logging.INFO, logger="pallas_kernels"):
        for _ in range(3):
            dispatch("logged op", {"a": decline, "b": named("b")}, None)
    assert [r.getMessage() for r in caplog.records] == ["logged op: running the 'b' implementation"]


def test_choices_and_their_reasons_are_recorded():
    with recorded() as heard:
        dispatch("one op", {"a": decline, "b": named("b")}, None)
        dispatch("one op", {"b": named("b")}, None)
        dispatch("another op", {"a": named("a")}, None)
    dispatch("a third op", {"a": named("a")}, None)
    assert heard == {"one op": {"b": {"needs another device"}}, "another op": {"a": set()}}


def test_summary_names_every_op_once():
    heard = {"topk": {"mosaic_gpu": set(), "xla": {"rows shorter than 128"}}, "fp4": {"xla": set()}}
    assert summary(heard) == "mosaic_gpu: topk; xla: fp4, topk"
