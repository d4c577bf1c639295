"""Which transform a parameter gets: one rule on its path, or an error that lists it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import optax

from v41flash.optim.axes import Spec, leaf_names


class Rule(NamedTuple):
    """Sends the parameters whose whole path matches to a transform.

    Attributes:
        pattern: regular expression of the path, such as `r"(.*/)?attn/wq_b"`. Paths are joined by
            "/": keys of dicts, names of attributes, numbers of list entries.
        label: name of the transform.
        spec: which axes form the matrix, for the transforms that ask for it.
    """

    pattern: str
    label: str
    spec: Spec | None = None


class PartitionError(ValueError):
    """Parameters that no rule matches, or several do."""


def match(rules: Sequence[Rule], tree: Any) -> Any:
    """The tree of each parameter's rule.

    Args:
        rules: patterns in any order.
        tree: the parameters (or anything of their structure).

    Returns:
        A tree like `tree` with a `Rule` in place of each leaf.

    Raises:
        PartitionError: a parameter does not match exactly one rule; all such are listed.

    Example:
        >>> rules = [Rule(".*kernel", "matrix"), Rule(".*bias", "vector")]
        >>> params = {"dense": {"kernel": 1.0, "bias": 2.0}}
        >>> match(rules, params)["dense"]["bias"].label
        'vector'
        >>> match(rules, {"dense": {"scale": 1.0}})
        Traceback (most recent call last):
        v41flash.optim.partition.PartitionError: every parameter must match exactly one rule:
          dense/scale: none
    """
    compiled = _compiled(rules)
    found, faults = [], []
    for name in leaf_names(tree):
        matching = [rule for pattern, rule in compiled if pattern.fullmatch(name)]
        found.append(matching[0] if matching else None)
        if len(matching) != 1:
            several = ", ".join(f"{rule.pattern!r} ({rule.label})" for rule in matching)
            faults.append(f"  {name}: {several or 'none'}")
    if faults:
        raise PartitionError(
            "every parameter must match exactly one rule:\n" + "\n".join(sorted(faults))
        )
    return jax.tree.unflatten(jax.tree.structure(tree), found)


def labels(rules: Sequence[Rule]) -> Callable[[Any], Any]:
    """A function from a parameter tree to the tree of labels, as `optax.partition` takes one."""
    return lambda tree: _map_rules(lambda rule: rule.label, rules, tree)


def specs(rules: Sequence[Rule]) -> Callable[[Any], Any]:
    """A function from a parameter tree to the tree of specs, as `scale_by_head_muon` takes one."""
    return lambda tree: _map_rules(lambda rule: rule.spec, rules, tree)


def partition(
    transforms: Mapping[str, optax.GradientTransformation], rules: Sequence[Rule]
) -> optax.GradientTransformationExtraArgs:
    """`optax.partition` by path rules.

    Args:
        transforms: label -> transform.
        rules: every parameter must match exactly one of them.

    Returns:
        The transform; its `init` and `update` raise PartitionError for parameters at fault.

    Raises:
        ValueError: a rule's label has no transform, or its pattern is no regular expression.

    Example:
        >>> import jax.numpy as jnp
        >>> rules = [Rule(".*kernel", "move"), Rule(".*bias", "stay")]
        >>> tx = partition({"move": optax.sgd(1.0), "stay": optax.set_to_zero()}, rules)
        >>> params = {"kernel": jnp.ones(2), "bias": jnp.ones(2)}
        >>> updates, _ = tx.update(params, tx.init(params))
        >>> updates["kernel"].tolist(), updates["bias"].tolist()
        ([-1.0, -1.0], [0.0, 0.0])
    """
    unknown = sorted({rule.label for rule in rules} - set(transforms))
    if unknown:
        raise ValueError(f"no transform for label {unknown[0]!r}; there is {sorted(transforms)}")
    _compiled(rules)
    return optax.partition(transforms, labels(rules))


def _compiled(rules: Sequence[Rule]) -> list[tuple[re.Pattern[str], Rule]]:
    found = []
    for rule in rules:
        try:
            found.append((re.compile(rule.pattern), rule))
        except (re.error, TypeError) as error:
            raise ValueError(f"{rule}: the pattern is no regular expression: {error}") from error
    return found


def _map_rules(function: Callable[[Rule], Any], rules: Sequence[Rule], tree: Any) -> Any:
    return jax.tree.map(function, match(rules, tree), is_leaf=lambda node: isinstance(node, Rule))
