"""hivemind's averaging over links of 4 bits a value: two peers here, their mean, the bytes sent.

python examples/hivemind_compression.py
"""

import threading

import hivemind
import torch
from hivemind.averaging import DecentralizedAverager
from hivemind.compression import CompressionInfo

from swarm_ft.codec.for_hivemind import CodecCompression, register_compression

if __name__ == "__main__":
    compression = CodecCompression("q4+z")
    register_compression(compression)  # averagers' own processes are forked from this one
    torch.manual_seed(0)
    gradients = [torch.randn(64, 1024) for _ in range(2)]
    exact = torch.stack(gradients).mean(0)

    info = CompressionInfo.from_tensor(gradients[0])
    sent = len(compression.compress(gradients[0], info).buffer)
    print(f"a gradient takes {8 * sent / gradients[0].numel():.1f} bits a value")

    first = hivemind.DHT(start=True)
    second = hivemind.DHT(initial_peers=first.get_visible_maddrs(), start=True)
    averagers = [
        DecentralizedAverager(
            [gradient],
            dht,
            prefix="gradients",
            target_group_size=2,
            min_matchmaking_time=1.0,
            compression=compression,
            start=True,
        )
        for gradient, dht in zip(gradients, (first, second), strict=True)
    ]
    rounds = [threading.Thread(target=one.step, kwargs={"timeout": 20}) for one in averagers]
    for one in rounds:
        one.start()
    for one in rounds:
        one.join()
    for name, averager in zip("ab", averagers, strict=True):
        with averager.get_tensors() as (found,):
            error = ((found - exact).norm() / exact.norm()).item()
            print(f"peer {name}: the mean, within {error:.1%}")
    for one in (*averagers, second, first):
        one.shutdown()
