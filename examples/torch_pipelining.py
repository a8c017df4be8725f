"""torch.distributed.pipelining with compressed boundaries: two processes, 1F1B, 4 bits a value.

python examples/torch_pipelining.py
"""

import os
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from swarm_ft.codec.for_pipelining import ReceiveEnd, SendEnd

TOKENS, CHANNELS, WORDS = 32, 64, 50
BATCH, MICROBATCHES = 8, 4


class Lower(nn.Module):
    """The stage below the boundary."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(WORDS, CHANNELS), nn.LayerNorm(CHANNELS)
        self.end = SendEnd(TOKENS, CHANNELS, forward_codec="aq4", backward_codec="q4")

    def forward(self, tokens: Tensor, sample_ids: Tensor) -> Tensor:
        sent: Tensor = self.end(self.norm(self.embed(tokens)), sample_ids)
        return sent


class Upper(nn.Module):
    """The stage above it."""

    def __init__(self) -> None:
        super().__init__()
        self.end = ReceiveEnd(TOKENS, CHANNELS, forward_codec="aq4", backward_codec="q4")
        self.layer, self.head = nn.Linear(CHANNELS, CHANNELS), nn.Linear(CHANNELS, WORDS)

    def forward(self, words: Tensor, sample_ids: Tensor) -> Tensor:
        logits: Tensor = self.head(nn.functional.gelu(self.layer(self.end(words, sample_ids))))
        return logits


def loss_of(logits: Tensor, tokens: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def work(rank: int, meeting: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    torch.manual_seed(rank)
    torch.set_num_threads(1)
    module = (Lower, Upper)[rank]()
    passed = module.end.example(BATCH // MICROBATCHES)
    tokens = torch.randint(0, WORDS, (16, TOKENS), generator=torch.Generator().manual_seed(0))
    shapes = (tokens[: len(passed)], passed, torch.zeros(len(passed), TOKENS, WORDS))
    stage = PipelineStage(
        module,
        rank,
        2,
        torch.device("cpu"),
        input_args=shapes[rank],
        output_args=shapes[rank + 1],
    )
    schedule = Schedule1F1B(stage, n_microbatches=MICROBATCHES, loss_fn=loss_of)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    for epoch in range(8):
        for batch in torch.arange(16).chunk(16 // BATCH):
            optimizer.zero_grad()
            if rank == 0:
                schedule.step(tokens[batch], sample_ids=batch)
            else:
                losses: list[Tensor] = []
                schedule.step(target=tokens[batch], losses=losses, sample_ids=batch)
            optimizer.step()
        if rank == 1:
            loss = torch.stack(losses).mean().item()
            bits = 32 * module.end.words / (TOKENS * CHANNELS)
            print(f"epoch {epoch}  loss {loss:.3f}  {bits:.1f} bits a value", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as folder:
        meeting = os.path.join(folder, "meeting")
        mp.spawn(work, (meeting,), nprocs=2)  # type: ignore[attr-defined, no-untyped-call]
