"""Recipes of the fused cells of recurrent layers."""

from typing import Any

from lightning_dpx.memory.execute.recipes.registry import aten, recipe


# On GPUs a cell is one kernel; on the host it consists of ordinary operators, which have recipes.
@recipe("ThnnFusedLstmCellBackward0")
def _lstm_cell(node: Any) -> Any:
    output = node.output  # the hidden state and the cell's are results of one node
    inputs = [node.saved("input_gates", edge=0), node.saved("hidden_gates", edge=1), node.saved("cx", edge=2)]
    operator = aten._thnn_fused_lstm_cell.default
    return (lambda *given: operator(*given)[output]), [*inputs, *_biases(node)]


@recipe("ThnnFusedGruCellBackward0")
def _gru_cell(node: Any) -> Any:
    inputs = [node.saved("input_gates", edge=0), node.saved("hidden_gates", edge=1), node.saved("hx", edge=2)]
    operator = aten._thnn_fused_gru_cell.default
    # The second result is what the kernel's own backward works with.
    return (lambda *given: operator(*given)[0]), [*inputs, *_biases(node)]


def _biases(node: Any) -> list[Any]:
    """Both biases; none of a cell without."""
    biases = [node.optional("input_bias"), node.optional("hidden_bias")]
    return [bias for bias in biases if bias is not None]
