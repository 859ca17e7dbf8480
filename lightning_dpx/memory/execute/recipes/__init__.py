"""How the output of an operator is computed again, from the node that autograd made for its backward.

One recipe per node name. A recipe looks at the node once, in the forward, and returns a function of tensors together
with where these tensors come from: saved by the node itself, or the outputs of the nodes before it. It must not hold on
to the node. It repeats the very operator on the very inputs, so the result is the same bits; planning checks that.

    @recipe("GeluBackward0")
    def _gelu(node):
        return partial(F.gelu, approximate=node.approximate), [node.saved("self", edge=0)]

A node is seen as :class:`lightning_dpx.memory.execute.graph_tape.Node`. ``node.saved(name)`` is an input that the
operator kept, ``node.edge(i)`` the i-th input along the graph, ``node.operand(i)`` likewise, or what the call got in
its place (see :mod:`lightning_dpx.memory.execute.untracked_inputs`), and any other attribute an argument that is no
tensor. A recipe that cannot work for this call raises :class:`NotRecomputable`. Recipes of one's own are added by
:func:`register_recipe`.
"""

# Importing a file registers its recipes.
from lightning_dpx.memory.execute.recipes import (
    attention,
    combining,
    matrices,
    norms,
    pointwise,
    pooling,
    recurrent,
    second_order,
    shapes,
)
from lightning_dpx.memory.execute.recipes.registry import (
    OWN_RECIPES,
    RECIPES,
    VIEWS,
    NotNoted,
    NotRecomputable,
    own_recipes,
    recipe,
    recipe_for,
    register_recipe,
    view,
)

__all__ = [
    "NotNoted",
    "NotRecomputable",
    "OWN_RECIPES",
    "RECIPES",
    "VIEWS",
    "attention",
    "combining",
    "matrices",
    "norms",
    "own_recipes",
    "pointwise",
    "pooling",
    "recipe",
    "recipe_for",
    "recurrent",
    "register_recipe",
    "second_order",
    "shapes",
    "view",
]
