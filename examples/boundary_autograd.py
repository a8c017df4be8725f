"""A model of one's own with a compressed boundary in it: what it learns, and what it would send.

python examples/boundary_autograd.py
"""

import torch
from torch import nn

from swarm_ft.codec.batches import CompressedBoundary

torch.manual_seed(0)
lower = nn.Sequential(nn.Embedding(50, 64), nn.LayerNorm(64))
upper = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 50))
boundary = CompressedBoundary(forward="aq3+z", backward="q3+z")
optimizer = torch.optim.AdamW([*lower.parameters(), *upper.parameters()], lr=1e-2)
tokens = torch.randint(0, 50, (16, 32))  # 16 samples, each its own sequence

for epoch in range(8):
    for batch in torch.arange(16).chunk(4):
        hidden = boundary(lower(tokens[batch]), batch.tolist())
        loss = nn.functional.cross_entropy(upper(hidden).flatten(0, 1), tokens[batch].flatten())
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    bits = 32 * boundary.sent_bytes / boundary.uncompressed_bytes
    print(f"epoch {epoch}  loss {loss.item():.3f}  {bits:.1f} bits a value")
