"""Frozen weights in fewer bits: how they are held, and what they are to compute with.

Whatever the form, a weight is made float32 when it is used, by steps that have one result on every
machine: bfloat16 is widened, and of a packed one each value is a code's number times its block's
scale, one product of float32. So replicas compute with the same numbers, and no layer, backward or
adapter knows of forms but by `weight_of`. Packing is done on the CPU while the file is read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from swarm_ft.protocol.spec.run_spec import PACKED_VALUES, RunSpec
from swarm_ft.stage.skeleton import is_below

SCALES = "_scales"
"""After a packed weight's name: that of its blocks' scales."""
_CHUNK_VALUES = 1 << 20
# The quantiles of a normal distribution, as bitsandbytes has them (Dettmers et al. 2023, arXiv
# 2305.14314), which gives the same codes and scales for the same weight.
NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)


@dataclass(frozen=True, slots=True)
class Packing:
    """Codes of 8 or 4 bits, and a float32 scale for each block of `PACKED_VALUES` values.

    Attributes:
        shape: of the weight; its values are packed in the order in which they are stored.
        bits: 8 for whole numbers of -127 to 127, 4 for `NF4`, two in a byte.
    """

    shape: torch.Size
    bits: int

    @property
    def _num_codes(self) -> int:
        return self.shape.numel() * self.bits // 8

    @property
    def _dtype(self) -> torch.dtype:
        return torch.int8 if self.bits == 8 else torch.uint8

    def empty(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Room for codes and scales."""
        return (
            torch.empty(self._num_codes, dtype=self._dtype, device=device),
            torch.empty(self.shape.numel() // PACKED_VALUES, device=device),
        )

    def packed(self, pieces: Iterable[Tensor], device: torch.device) -> tuple[Tensor, Tensor]:
        """Codes and scales of values that come flat, in pieces of whole blocks."""
        codes, scales = self.empty(device)
        at = 0
        for piece in pieces:
            for values in torch.split(piece, _CHUNK_VALUES):
                part, of_blocks = self._pack(values.float().view(-1, PACKED_VALUES))
                codes[at * self.bits // 8 :][: len(part)].copy_(part)
                scales[at // PACKED_VALUES :][: len(of_blocks)].copy_(of_blocks)
                at += len(values)
        return codes, scales

    def unpacked(self, codes: Tensor, scales: Tensor) -> Tensor:
        """The weight in float32, of memory of its own."""
        if self.bits == 8:
            values = codes.float()
        else:
            values = torch.empty(self.shape.numel(), device=codes.device)
            table = _PAIRS if codes.device.type == "cpu" else _PAIRS.to(codes.device)
            pairs = values.view(torch.int64)
            # In pieces, so that there is no second tensor of their size.
            pieces = (torch.split(one, _CHUNK_VALUES) for one in (codes, pairs))
            for some, to in zip(*pieces, strict=True):
                torch.index_select(table, 0, some.int(), out=to)
        return values.view(-1, PACKED_VALUES).mul_(scales[:, None]).view(self.shape)

    def _pack(self, blocks: Tensor) -> tuple[Tensor, Tensor]:
        largest = blocks.abs().amax(1)
        scales = largest / 127 if self.bits == 8 else largest
        parts = blocks / torch.where(scales > 0, scales, 1.0)[:, None]
        if self.bits == 8:
            return parts.round().to(torch.int8).view(-1), scales
        codes = torch.bucketize(parts, _BETWEEN, out_int32=True).to(torch.uint8).view(-1)
        return (codes[::2] << 4) | codes[1::2], scales


def _pairs() -> Tensor:
    """Both numbers of each byte, the higher four bits' first; as one int64, which is looked up."""
    table, codes = torch.tensor(NF4), torch.arange(256)
    pairs = torch.stack([table[codes >> 4], table[codes & 15]], dim=1)
    return pairs.view(torch.int64).view(256)


_PAIRS = _pairs()
_BETWEEN = (torch.tensor(NF4[1:]) + torch.tensor(NF4[:-1])) / 2

Form = torch.dtype | Packing


# ---- which weights of a stage are held how


def own_linears(module: nn.Module) -> dict[str, nn.Module]:
    """Linear layers by name that compute as their classes do, with a weight that is theirs alone.

    Some families' layers compute otherwise, by a forward of their own.
    """
    every = module.named_parameters(remove_duplicate=False)
    uses = Counter(id(parameter) for _, parameter in every)
    return {
        name: layer
        for name, layer in module.named_modules()
        if type(layer).forward in (nn.Linear.forward, Conv1D.forward)
        and uses[id(layer.weight)] == 1
    }


@dataclass(frozen=True, slots=True)
class Forms:
    """How a stage's frozen weights are held, by name; those that are not named, as float32.

    Attributes:
        widened: embeddings whose rows are made float32 as they come.
    """

    of: Mapping[str, Form] = field(default_factory=dict)
    widened: tuple[nn.Module, ...] = ()

    def at(self, names: Iterable[str]) -> Form:
        """Of a tensor that is read for all these names."""
        found = {self.of.get(name, torch.float32) for name in names}
        return found.pop() if len(found) == 1 else torch.float32


def frozen_forms(
    module: nn.Module, blocks: str, spec: RunSpec, whole: Collection[str] = ()
) -> Forms:
    """What a run says of a stage's weights. Norms and biases stay float32.

    Args:
        module: has no weights yet.
        blocks: name of the list of its blocks, in which linear layers may be packed.
        spec: the run.
        whole: names of modules that train, beside adapters.
    """
    train = spec.train
    if not train.adapts:
        return Forms()
    linears = own_linears(module)
    found: dict[str, Form] = {}
    widened: tuple[nn.Module, ...] = ()
    if train.held_dtype_bytes < 4:
        tables = {
            name: layer
            for name, layer in module.named_modules()
            if type(layer).forward is nn.Embedding.forward
        }
        widened = tuple(tables.values())
        frozen = [name for name in (*linears, *tables) if not is_below(name, whole)]
        found |= {f"{name}.weight": torch.bfloat16 for name in frozen}
    for name, layer in linears.items() if train.packed_bits else ():
        shape = layer.get_parameter("weight").shape
        if name.startswith(f"{blocks}.") and shape.numel() % PACKED_VALUES == 0:
            found[f"{name}.weight"] = Packing(shape, train.packed_bits)
    return Forms(found, widened)


def prepare(module: nn.Module, forms: Forms) -> None:
    """Have a module without weights take them in these forms."""
    for name, form in forms.of.items():
        if isinstance(form, Packing):
            layer = module.get_submodule(name.rpartition(".")[0])
            codes, scales = form.empty(torch.device("meta"))
            layer.weight = nn.Parameter(codes, requires_grad=False)
            layer.register_buffer(f"weight{SCALES}", scales)
            vars(layer)["packing"] = form
    for table in forms.widened:
        table.register_forward_hook(_widen)


def _widen(_table: nn.Module, _inputs: object, rows: Tensor) -> Tensor:
    return rows.float()


# ---- a weight in its form


def packing_of(layer: nn.Module) -> Packing | None:
    """How a layer's weight is packed."""
    found: Packing | None = vars(layer).get("packing")
    return found


def weight_of(layer: nn.Module) -> Tensor:
    """A linear layer's weight in float32, whatever its form, without a gradient."""
    weight, packing = layer.get_parameter("weight").detach(), packing_of(layer)
    if packing is None:
        return weight.float()
    return packing.unpacked(weight, layer.get_buffer(f"weight{SCALES}"))


@dataclass(frozen=True, slots=True)
class Lazy:
    """A tensor that takes no memory until it is made, each time anew.

    Attributes:
        dtype: that it will have.
        shape: that it will have.
        how: makes it.
    """

    dtype: torch.dtype
    shape: torch.Size
    how: Callable[[], Tensor]

    def made(self) -> Tensor:
        """It, with its values."""
        return self.how()

    def outline(self) -> Tensor:
        """One of this type and shape, without values."""
        return torch.empty(self.shape, dtype=self.dtype, device="meta")


def in_float32(module: nn.Module) -> dict[str, Lazy]:
    """A module's state by the names that it has in float32."""
    state = {
        name: _wide(tensor)
        for name, tensor in module.state_dict().items()
        if not name.endswith(SCALES)
    }
    packed = {
        name: (layer, packing)
        for name, layer in module.named_modules()
        if (packing := packing_of(layer)) is not None
    }
    return state | {
        f"{name}.weight": Lazy(torch.float32, packing.shape, partial(weight_of, layer))
        for name, (layer, packing) in packed.items()
    }


def _wide(tensor: Tensor) -> Lazy:
    dtype = torch.float32 if tensor.is_floating_point() else tensor.dtype
    return Lazy(dtype, tensor.shape, partial(tensor.to, dtype))
