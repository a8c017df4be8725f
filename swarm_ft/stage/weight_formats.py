"""Frozen weights in fewer bits: their forms in memory, and their float32 values.

In every form a weight becomes float32 when it is used, with the same result on every machine:
bfloat16 is widened, and a packed value is its code times the scale of its block, one float32
product. Replicas therefore compute with the same numbers. Layers, backward passes and adapters read
weights through `weight_of` alone. Weights are packed on the CPU while the file is read.
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
"""Suffix of a packed weight's name, for the scales of its blocks."""
_CHUNK_VALUES = 1 << 20
# These are the quantiles of a normal distribution from bitsandbytes (Dettmers et al. 2023, arXiv
# 2305.14314), so that equal weights get equal codes and scales.
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
        shape: Shape of the weight; its values are packed in the order of storage.
        bits: Bits of a code: 8 for integers from -127 to 127, 4 for `NF4`, two in a byte.
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
        """Return empty tensors for codes and scales."""
        return (
            torch.empty(self._num_codes, dtype=self._dtype, device=device),
            torch.empty(self.shape.numel() // PACKED_VALUES, device=device),
        )

    def packed(self, pieces: Iterable[Tensor], device: torch.device) -> tuple[Tensor, Tensor]:
        """Return codes and scales of flat values that arrive in pieces of whole blocks."""
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
        """Return the weight in float32, in memory of its own."""
        if self.bits == 8:
            values = codes.float()
        else:
            values = torch.empty(self.shape.numel(), device=codes.device)
            table = _PAIRS if codes.device.type == "cpu" else _PAIRS.to(codes.device)
            pairs = values.view(torch.int64)
            # The pieces avoid a second tensor of the same size.
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
    """Return both numbers of each byte, the higher four bits first, as one int64 for the lookup."""
    table, codes = torch.tensor(NF4), torch.arange(256)
    pairs = torch.stack([table[codes >> 4], table[codes & 15]], dim=1)
    return pairs.view(torch.int64).view(256)


_PAIRS = _pairs()
_BETWEEN = (torch.tensor(NF4[1:]) + torch.tensor(NF4[:-1])) / 2

WeightFormat = torch.dtype | Packing


# ---- the forms of a stage's weights


def own_linears(module: nn.Module) -> dict[str, nn.Module]:
    """Return the linear layers by name that have their class's forward and an own weight.

    Layers of some families have a forward of their own.
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
class WeightFormats:
    """Forms of a stage's frozen weights by name; all other weights are float32.

    Attributes:
        of: Form of each weight by name.
        widened: Embeddings whose rows become float32 when they are read.
    """

    of: Mapping[str, WeightFormat] = field(default_factory=dict)
    widened: tuple[nn.Module, ...] = ()

    def at(self, names: Iterable[str]) -> WeightFormat:
        """Return the form of a tensor that is read for all these names."""
        found = {self.of.get(name, torch.float32) for name in names}
        return found.pop() if len(found) == 1 else torch.float32


def frozen_formats(
    module: nn.Module, blocks: str, spec: RunSpec, whole: Collection[str] = ()
) -> WeightFormats:
    """Return the forms of a stage's weights in a run. Norms and biases stay float32.

    Args:
        module: Module without weights.
        blocks: Name of the list of its blocks, in which linear layers may be packed.
        spec: Spec of the run.
        whole: Names of modules that train in full beside adapters.
    """
    train = spec.train
    if not train.adapts:
        return WeightFormats()
    linears = own_linears(module)
    found: dict[str, WeightFormat] = {}
    widened: tuple[nn.Module, ...] = ()
    if train.frozen_value_bytes < 4:
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
    return WeightFormats(found, widened)


def prepare(module: nn.Module, forms: WeightFormats) -> None:
    """Prepare a module without weights for weights in these forms."""
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


# ---- weights in their forms


def packing_of(layer: nn.Module) -> Packing | None:
    """Return the packing of a layer's weight; None if it is not packed."""
    found: Packing | None = vars(layer).get("packing")
    return found


def weight_of(layer: nn.Module) -> Tensor:
    """Return a linear layer's weight in float32, in any form, without a gradient."""
    weight, packing = layer.get_parameter("weight").detach(), packing_of(layer)
    if packing is None:
        return weight.float()
    return packing.unpacked(weight, layer.get_buffer(f"weight{SCALES}"))


@dataclass(frozen=True, slots=True)
class Lazy:
    """A tensor that is created when it is needed, and takes no memory before.

    Attributes:
        dtype: Dtype of the tensor.
        shape: Shape of the tensor.
        how: Creates the tensor.
    """

    dtype: torch.dtype
    shape: torch.Size
    how: Callable[[], Tensor]

    def made(self) -> Tensor:
        """Create the tensor."""
        return self.how()

    def outline(self) -> Tensor:
        """Return a tensor of this dtype and shape without values."""
        return torch.empty(self.shape, dtype=self.dtype, device="meta")


def in_float32(module: nn.Module) -> dict[str, Lazy]:
    """Return a module's state with float32 names and values."""
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
