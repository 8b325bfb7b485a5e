"""Data parallel and fully sharded training of a layer: two processes on gloo against one on the whole batch."""

import pytest
import torch
import torch.distributed as dist
from helpers import assert_as_good_as, randn

from headwise import Causal, DynamicCache, MultiHeadAttention, RelativeBias, RotaryEmbedding, Window

# `plain`: the processes import headwise anew, without the annotation hook
pytestmark = pytest.mark.plain
WORLD, B, T, E, HEADS = 2, 4, 7, 24, 4


def build() -> MultiHeadAttention:
    bias = RelativeBias(HEADS, num_buckets=8, max_distance=9)
    layer = MultiHeadAttention(
        E, HEADS, num_kv_heads=2, rotary=RotaryEmbedding(6), sinks=True, score_mods=[bias], mask=Causal() & Window(5),
        q_norm=torch.nn.RMSNorm(6), k_norm=torch.nn.RMSNorm(6),
    )  # fmt: skip
    with torch.no_grad():
        for i, parameter in enumerate(layer.parameters()):
            parameter.copy_(randn(*parameter.shape, seed=240 + i, scale=0.4))
    return layer.double()


def tokens() -> torch.Tensor:
    return randn(B, T, E, seed=250, dtype=torch.float64)


def train(kind: str, rank: int, folder: str) -> None:
    """What one process does: a step on its half of the batch, and a step of generation; its results go to a file."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=WORLD)
    layer = build()
    if kind == "ddp":
        run = torch.nn.parallel.DistributedDataParallel(layer)
    else:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        run = fully_shard(layer, mesh=init_device_mesh("cpu", (WORLD,)))
    share = tokens().chunk(WORLD)[rank]
    run(share).square().mean().backward()
    grads = {name: p.grad for name, p in layer.named_parameters()}
    weights = layer.state_dict()
    if kind == "fsdp":
        grads, weights = ({n: t.full_tensor() for n, t in part.items()} for part in (grads, weights))
    cache = DynamicCache()
    with torch.no_grad():
        steps = torch.cat([run(part, cache=cache).clone() for part in share.split((4, 3), 1)], 1)
    torch.save({"grads": grads, "weights": weights, "steps": steps}, f"{folder}/{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def process(rank: int, kind: str, folder: str) -> None:
    train(kind, rank, folder)


@pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="this torch has no gloo")
@pytest.mark.parametrize("kind", ("ddp", "fsdp"))
def test_two_processes_train_as_one(kind, tmp_path):
    torch.multiprocessing.spawn(process, (kind, str(tmp_path)), WORLD)
    layer = build()
    layer(tokens()).square().mean().backward()
    for rank in range(WORLD):
        found = torch.load(tmp_path / f"{rank}.pt")
        assert list(found["weights"]) == list(layer.state_dict()), "names stay those of the layer"
        for name, parameter in layer.named_parameters():
            assert found["weights"][name].equal(parameter), name
            assert_as_good_as(found["grads"][name], parameter.grad, terms=B * T * E, inner=1.0, what=name)
        want = layer(tokens().chunk(WORLD)[rank])
        assert_as_good_as(found["steps"], want, terms=64, inner=1.0)
