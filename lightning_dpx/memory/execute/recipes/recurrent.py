"""Recipes of the fused cells of recurrent layers."""

from typing import Any

from lightning_dpx.memory.execute.recipes.registry import aten, recipe


@recipe("ThnnFusedLstmCellBackward0")
def _lstm_cell(node: Any) -> Any:
    output = node.output
    inputs = [node.saved("input_gates", edge=0), node.saved("hidden_gates", edge=1), node.saved("cx", edge=2)]
    operator = aten._thnn_fused_lstm_cell.default
    return (lambda *given: operator(*given)[output]), [*inputs, *_biases(node)]


@recipe("ThnnFusedGruCellBackward0")
def _gru_cell(node: Any) -> Any:
    inputs = [node.saved("input_gates", edge=0), node.saved("hidden_gates", edge=1), node.saved("hx", edge=2)]
    operator = aten._thnn_fused_gru_cell.default
    return (lambda *given: operator(*given)[0]), [*inputs, *_biases(node)]


def _biases(node: Any) -> list[Any]:
    found = [node.optional("input_bias"), node.optional("hidden_bias")]
    return [bias for bias in found if bias is not None]
