"""Which labels the result of a PromQL expression has, held against the labels that exist."""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any

import promql_parser as promql

#: What Prometheus adds to every sample of a target; `service` by configs/prometheus/prometheus.yml.
TARGET_LABELS = frozenset({"job", "instance", "service"})
_TOGETHER = ("and", "or", "unless")


class UnknownName(AssertionError):
    """A metric or label that nothing exposes."""


def outputs(text: str, exposed: Mapping[str, Set[str]]) -> frozenset[str]:
    """Labels of the result of `text`. `exposed`: labels of each sample name.

    Raises UnknownName for a metric, or a label in a matcher or grouping, that does not exist.
    """
    return _outputs(promql.parse(text), exposed)


def matchers(text: str) -> list[tuple[str, str, str]]:
    """(metric, label, value) of every `label="value"` in `text`."""
    found: list[tuple[str, str, str]] = []

    def visit(node: Any) -> None:
        if isinstance(node, promql.VectorSelector):
            found.extend(
                (node.name, matcher.name, matcher.value)
                for matcher in node.matchers.matchers
                if matcher.op == promql.MatchOp.Equal
            )
        for child in _children(node):
            visit(child)

    visit(promql.parse(text))
    return found


def _outputs(node: Any, exposed: Mapping[str, Set[str]]) -> frozenset[str]:
    if isinstance(node, promql.VectorSelector):
        if node.name not in exposed:
            raise UnknownName(f"nothing exposes {node.name}")
        labels = frozenset(exposed[node.name]) | TARGET_LABELS
        return _known({matcher.name for matcher in node.matchers.matchers}, labels, node) | labels
    beneath = [_outputs(child, exposed) for child in _children(node)]
    if isinstance(node, promql.AggregateExpr):
        (labels,) = beneath
        if node.modifier is None:
            return frozenset()
        named = _known(set(node.modifier.labels), labels, node)
        by = node.modifier.type == promql.AggModifierType.By
        return named if by else labels - named
    if isinstance(node, promql.BinaryExpr):
        left, right = beneath
        if node.modifier is not None and node.modifier.matching is not None:
            for side in beneath:
                _known(set(node.modifier.matching.labels), side, node)
        return left if str(node.op) in _TOGETHER else left or right
    if isinstance(node, promql.Call) and node.func.name == "absent":
        return frozenset()
    everything: frozenset[str] = frozenset().union(*beneath)
    if isinstance(node, promql.Call) and node.func.name == "histogram_quantile":
        _known({"le"}, everything, node)
        return everything - {"le"}
    return everything


def _children(node: Any) -> list[Any]:
    if isinstance(node, promql.BinaryExpr):
        return [node.lhs, node.rhs]
    if isinstance(node, promql.Call):
        return list(node.args)
    if isinstance(node, promql.MatrixSelector):
        return [node.vector_selector]
    if isinstance(
        node, promql.AggregateExpr | promql.ParenExpr | promql.UnaryExpr | promql.SubqueryExpr
    ):
        return [node.expr]
    return []


def _known(names: Set[str], labels: Set[str], node: Any) -> frozenset[str]:
    if wrong := sorted(names - labels):
        raise UnknownName(f"no label {wrong} in {node}; there are {sorted(labels)}")
    return frozenset(names)
