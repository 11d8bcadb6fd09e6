"""What a layer does before it attends: to its module's input, and to queries, keys and values."""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor, nn
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.attention.attention import get_attention_context

from heedful.nn import Layer, ProjectionContext
from heedful_vllm.attention import LayerImpl
from heedful_vllm.batch import Batch
from heedful_vllm.state import Rows

PARTS = ("q", "k", "v")


class Projections:
    """The hooks on one attention module of vLLM, and the rows that its layer's convolutions read.

    Arguments:
        module: the attention module, whose `attn` has the layer already.
        layer: heedful's.
    """

    def __init__(self, module: nn.Module, layer: Layer) -> None:
        self.name, self.impl, self.layer = module.attn.layer_name, module.attn.impl, layer
        self.widths = (module.q_size, module.kv_size, module.kv_size)
        requests = get_current_vllm_config().scheduler_config.max_num_seqs
        self.rows = {part: Rows(layer.past_inputs, requests) for part in ("input", *PARTS)}
        module.q_size *= layer.queries_per_head
        if layer.needs & {"input", "unprojected"}:
            module.register_forward_pre_hook(self.before_module, with_kwargs=True)
        if "unrotated" in layer.needs:
            module.qkv_proj.register_forward_hook(self.after_projection)

    def before_module(self, module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """A forward pre-hook of the attention module: changes its input and hands it over."""
        x = kwargs["hidden_states"]
        if "unprojected" in self.layer.needs:
            x = self._changed("input", x, self.layer.before_projection)
        impl: LayerImpl = self.impl
        impl.input = x if "input" in self.layer.needs else None
        return args, kwargs | {"hidden_states": x}

    def after_projection(
        self, module: nn.Module, args: tuple, output: tuple[Float[Tensor, "tokens C"], object]
    ) -> tuple[Tensor, object]:
        """A forward hook of the projection of queries, keys and values: changes these."""
        changed = []
        for part, x in zip(PARTS, output[0].split(self.widths, dim=-1), strict=True):

            def change(x: Tensor, tokens: ProjectionContext, part: str = part) -> Tensor:
                return self.layer.before_rotation(part, x, tokens)

            heads = x.unflatten(-1, (-1, self.layer.shape.dim))
            changed.append(self._changed(part, heads, change, args[0]).flatten(1))
        return torch.cat(changed, dim=-1), output[1]

    def _changed(
        self,
        part: str,
        x: Float[Tensor, "tokens ..."],
        change: Callable[[Tensor, ProjectionContext], Tensor],
        took: Float[Tensor, "tokens E"] | None = None,
    ) -> Float[Tensor, "tokens ..."]:
        """The step's tokens after a change that may read each request's earlier ones."""
        batch: Batch | None = get_attention_context(self.name)[0]
        if batch is None or not self.layer.past_inputs:
            return change(x[None], ProjectionContext(None if took is None else took[None]))[0]
        changed = []
        for request in batch.requests:
            new = x[request.new]
            joined = self.rows[part].join(request.page, request.before, new)
            past = joined[: len(joined) - len(new)]
            own = None if took is None else took[None, request.new]
            tokens = ProjectionContext(own, past[None] if len(past) else None)
            changed.append(change(new[None], tokens)[0])
        rest = x[sum(len(part) for part in changed) :]  # what vLLM fills a step up with
        return torch.cat([*changed, rest])
