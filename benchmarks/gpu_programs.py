"""Ordinary programs for the battery for GPUs (`gpu.py`): what people write around a loop, on one rank or two.

Each takes a device and a method, trains, and raises if something is wrong. Ranks whose weights should be
equal are compared bit for bit. `late` is the one that looks for races between streams: gradients come late on
the caller's stream, and memory that was freed is overwritten at once.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import stenograd

__all__ = ["PROGRAMS", "named"]

Program = Callable[[torch.device, str], None]
_EVERY = ("dense", "bf16", "topk:ratio=0.1", "sign", "qsgd", "powersgd:rank=2")
_ROUNDS = ("local:every=2", "diloco:every=4,fragments=2/lowbit", "diloco:every=4,delay=1,mix=0.5", "gossip")


def _layers(device: torch.device, width: int = 64, count: int = 12) -> nn.Sequential:
    torch.manual_seed(0)
    pairs = [m for _ in range(count) for m in (nn.Linear(width, width), nn.Tanh())]
    return nn.Sequential(*pairs).to(device)


def _batches(device: torch.device, count: int, width: int = 64) -> list[Tensor]:
    g = torch.Generator().manual_seed(1 + dist.get_rank())
    return [torch.randn(8, width, generator=g).to(device) for _ in range(count)]


def _digest(model: nn.Module) -> str:
    flat = torch.cat([p.detach().reshape(-1).double() for p in model.parameters()])
    return hashlib.sha256(flat.cpu().numpy().tobytes()).hexdigest()


def _check(model: nn.Module, *, alike: bool = True) -> str:
    """Return a digest of parameters that are finite, and on all ranks equal if they should be."""
    assert all(bool(p.isfinite().all()) for p in model.parameters()), "parameters are not finite"
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, _digest(model))
    assert not alike or len(set(found)) == 1, "replicas differ"
    return str(found[dist.get_rank()])


def _is_exchanged_each_step(text: str) -> bool:
    return text in _EVERY


def late(device: torch.device, text: str) -> None:
    """Delay gradients on their stream, and overwrite freed memory: the bits of a run that waits each time."""

    def spoil(p: Tensor) -> None:
        for _ in range(2):
            torch.full_like(p, float("nan"))

    def run(*, waits: bool) -> str:
        model = _layers(device, 256)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

        def hook(p: Tensor, grad: Tensor) -> Tensor:
            if device.type == "cuda":
                torch.cuda.synchronize() if waits else torch.cuda._sleep(400_000)
            if not waits:
                spoil(p)
            return grad

        for p in model.parameters():
            p.register_hook(partial(hook, p.detach()))
        with stenograd.distribute(model, optimizer, text, bucket_bytes=1 << 19) as sync:
            for x in _batches(device, 9, 256):
                optimizer.zero_grad()
                model(x).square().mean().backward()
                if not waits:
                    spoil(next(model.parameters()))
                optimizer.step()
            with sync.consensus():
                return _check(model)

    wanted = run(waits=True)
    assert run(waits=True) == wanted, (
        "two runs that wait differ: the method or the device is not deterministic"
    )
    assert run(waits=False) == wanted, "a run whose gradients come late differs from one that waits"


def own_stream(device: torch.device, text: str) -> None:
    """Train in a stream of the program's own: the bits of the default stream."""

    def run(stream: Any) -> str:
        model = _layers(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        with stenograd.distribute(model, optimizer, text, bucket_bytes=1 << 14) as sync:
            data = _batches(device, 6)
            if stream is not None:
                torch.cuda.synchronize()
            with torch.cuda.stream(stream) if stream is not None else nullcontext():
                for x in data:
                    optimizer.zero_grad()
                    model(x).square().mean().backward()
                    optimizer.step()
            if stream is not None:
                torch.cuda.synchronize()
            with sync.consensus():
                return _check(model)

    assert run(None) == run(torch.cuda.Stream() if device.type == "cuda" else None), (
        "another stream, other bits"
    )


def amp(device: torch.device, text: str) -> None:
    """Train under autocast in bfloat16, clip gradients, accumulate over two passes."""
    model = _layers(device)
    fused = device.type == "cuda"
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused)
    with stenograd.distribute(model, optimizer, text, bucket_bytes=1 << 14) as sync:
        for at, x in enumerate(_batches(device, 8)):
            with nullcontext() if at % 2 else sync.no_sync(), torch.autocast(device.type, torch.bfloat16):
                model(x).float().square().mean().backward()
            if at % 2:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        with sync.consensus():
            _check(model)


def scaled(device: torch.device, text: str) -> None:
    """Train under a GradScaler; an overflow on one rank skips the step on all."""
    model = _layers(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler(device.type, init_scale=1024.0)
    dtype = torch.float16 if device.type == "cuda" else torch.bfloat16
    with stenograd.distribute(model, optimizer, text, bucket_bytes=1 << 14) as sync:
        for at, x in enumerate(_batches(device, 6)):
            before = _digest(model)
            optimizer.zero_grad()
            with torch.autocast(device.type, dtype):
                loss = model(x).float().square().mean()
            bad = at == 3 and dist.get_rank() == dist.get_world_size() - 1
            scaler.scale(loss * (float("inf") if bad else 1.0)).backward()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                scaler.step(optimizer)
            scaler.update()
            if at == 3 and _is_exchanged_each_step(text):
                assert _digest(model) == before, "an overflow on one rank changed the weights"
        with sync.consensus():
            _check(model)


def compiled(device: torch.device, text: str) -> None:
    """Train a compiled model."""
    model = _layers(device, count=3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with stenograd.distribute(model, optimizer, text, bucket_bytes=1 << 14) as sync:
        fast = torch.compile(model)
        for x in _batches(device, 4):
            optimizer.zero_grad()
            fast(x).square().mean().backward()
            optimizer.step()
        with sync.consensus():
            _check(model)


def ddp(device: torch.device, text: str) -> None:
    """Be DistributedDataParallel's hook: "dense" has the bits of DDP alone."""

    def run(text: str | None) -> str:
        model = _layers(device)
        ids = [device.index or 0] if device.type == "cuda" else None
        wrapped = DistributedDataParallel(
            model, device_ids=ids, bucket_cap_mb=0.02, gradient_as_bucket_view=True
        )
        hook = stenograd.ddp.register(wrapped, text) if text else None
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.01, momentum=0.9)
        for x in _batches(device, 6):
            optimizer.zero_grad()
            wrapped(x).square().mean().backward()
            if device.type == "cuda" and text:
                torch.cuda._sleep(200_000)
            optimizer.step()
        found = _check(model)
        if hook is not None:
            hook.close()
        return found

    found = run(text)
    assert text != "dense" or found == run(None), "other bits than DDP alone"


def conv(device: torch.device, text: str) -> None:
    """Train convolutions with channels last, batch normalisation, checkpointed activations, unused layers."""
    from torch.utils.checkpoint import checkpoint

    torch.manual_seed(0)
    body = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.ReLU())
    model: Any = nn.ModuleDict({"body": body, "head": nn.Linear(16, 4), "spare": nn.Linear(4, 4)})
    model = model.to(device).to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    g = torch.Generator().manual_seed(1 + dist.get_rank())
    with stenograd.distribute(model, optimizer, text, bucket_bytes=1 << 12) as sync:
        for at in range(6):
            x = torch.randn(4, 3, 16, 16, generator=g).to(device).to(memory_format=torch.channels_last)
            x.requires_grad_()
            optimizer.zero_grad()
            out = model["head"](checkpoint(model["body"], x, use_reentrant=False).mean((2, 3)))
            if at == 2 and dist.get_rank() == 0:
                out = out + model["spare"](out)
            out.square().mean().backward()
            optimizer.step()
        with sync.consensus():
            _check(model)


def types(device: torch.device, text: str) -> None:
    """Train layers in four data types in one model."""
    kinds = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Linear(33, 33).to(device, kind) for kind in kinds])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with stenograd.distribute(model, optimizer, text, bucket_bytes=1 << 12) as sync:
        for x in _batches(device, 4, 33):
            optimizer.zero_grad()
            losses = [m(x.to(kind)).square().mean().float() for m, kind in zip(model, kinds, strict=True)]
            torch.stack(losses).sum().backward()
            optimizer.step()
        with sync.consensus():
            _check(model)


def to_memory(device: torch.device, text: str) -> None:
    """Load on the CPU what was saved on the device, and go on there."""
    with tempfile.TemporaryDirectory() as own:
        folders: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(folders, own)
        folder = folders[0]
        for at, kind in enumerate((device, torch.device("cpu"), device)):
            model = _layers(kind)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
            everything: dict[str, Any] = {"model": model, "optimizer": optimizer}
            with stenograd.distribute(model, optimizer, text, bucket_bytes=1 << 14) as sync:
                if at:
                    stenograd.load_checkpoint(folder, sync=sync, **everything)
                for x in _batches(kind, 3):
                    optimizer.zero_grad()
                    model(x).square().mean().backward()
                    optimizer.step()
                stenograd.save_checkpoint(folder, step=sync.step, sync=sync, **everything)
                with sync.consensus():
                    _check(model)
        dist.barrier()


def graphed(device: torch.device, text: str) -> None:
    """Use CUDA graphs of the model's parts, as the error says; capturing a backward pass is that error."""
    if device.type != "cuda":
        return
    model = _layers(device, count=4)
    sample = torch.randn(8, 64, device=device, requires_grad=True)
    parts = torch.cuda.make_graphed_callables(model[:4], (sample,))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with stenograd.distribute(model, optimizer, text, bucket_bytes=1 << 14) as sync:
        for x in _batches(device, 4):
            optimizer.zero_grad()
            model[4:](parts(x.requires_grad_())).square().mean().backward()
            optimizer.step()
        with sync.consensus():
            _check(model)
        refused = None
        x = torch.randn(8, 64, device=device)
        try:
            with torch.cuda.graph(torch.cuda.CUDAGraph()):
                model(x).square().mean().backward()
        except stenograd.StenogradError as error:
            refused = error
        assert "CUDA graph" in str(refused), "a captured backward pass was not refused"


def sharded(device: torch.device, text: str) -> None:
    """Exchange between the replicas of a model that FSDP2 shards, one device in each."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device.type, (dist.get_world_size(), 1), mesh_dim_names=("replicate", "shard"))
    model = _layers(device, count=3)
    fully_shard(model, mesh=mesh["shard"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with stenograd.distribute(model, optimizer, text, group=mesh["replicate"]):
        for x in _batches(device, 4):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    for p in model.parameters():
        assert bool(p.to_local().isfinite().all())  # type: ignore[attr-defined]


def singa(device: torch.device, text: str) -> None:
    """Train by SINGA's `DistOpt`, in a mode."""
    from stenograd.singa import opt

    model = _layers(device)
    whole = opt.DistOpt(opt.SGD(lr=0.01, momentum=0.9))
    for x in _batches(device, 4):
        getattr(whole, f"backward_and_{text}")(model(x).square().mean())
    whole.finalize(model)
    _check(model)
    whole.close()


def mlbench(device: torch.device, text: str) -> None:
    """Train by an optimizer of MLBench."""
    from stenograd import mlbench as optimizers

    model = _layers(device)
    world = dist.get_world_size()
    made: Mapping[str, Callable[[], Any]] = {
        "CentralizedSGD": lambda: optimizers.CentralizedSGD(world, model, lr=0.01, momentum=0.9),
        "PowerSGD": lambda: optimizers.PowerSGD(model, 0.01, 0.9, world_size=world),
        "CentralizedSparsifiedSGD": lambda: optimizers.CentralizedSparsifiedSGD(
            model.parameters(), lr=0.01, sparse_grad_size=10, world_size=world
        ),
    }
    optimizer = made[text]()
    for x in _batches(device, 4):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    _check(model)


def heat(device: torch.device, text: str) -> None:
    """Train by Heat's DASO or its DataParallel."""
    from stenograd import heat as ht

    model = _layers(device)
    local = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    data = _batches(device, 4)
    if text == "DASO":
        phases = {"total_epochs": 4, "warmup_epochs": 1, "cooldown_epochs": 1}
        daso = ht.optim.DASO(local_optimizer=local, node_size=1, **phases)
        network: Any = ht.nn.DataParallelMultiGPU(model, daso)
        daso.last_batch = len(data) - 1
        for _ in range(4):
            loss = torch.zeros(())
            for x in data:
                daso.zero_grad()
                loss = network(x).square().mean()
                loss.backward()
                daso.step()
            daso.epoch_loss_logic(loss)
        daso.close()
    else:
        optimizer = ht.optim.DataParallelOptimizer(local, False)
        network = ht.nn.DataParallel(model, ht.MPI_WORLD, optimizer)
        for x in data:
            optimizer.zero_grad()
            network(x).square().mean().backward()
            optimizer.step()
        network.flush()
    _check(model)


@contextmanager
def _launched() -> Iterator[None]:
    """Set a launcher's variables, one device for all ranks: frameworks join the group that is there."""
    rank, world = str(dist.get_rank()), str(dist.get_world_size())
    ours = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": world}
    ours |= {"NODE_RANK": rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}
    with patch.dict(os.environ, ours):
        yield


def accelerate(device: torch.device, text: str) -> None:
    """Train by Hugging Face's Accelerate in bfloat16, with accumulation and clipping."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState, PartialState

    import stenograd.accelerate

    with _launched():
        accelerator = Accelerator(
            cpu=device.type == "cpu", mixed_precision="bf16", gradient_accumulation_steps=2
        )
        attached = stenograd.accelerate.use(accelerator, text)
        plain = _layers(device)
        optimizer: Any = torch.optim.AdamW(plain.parameters(), lr=1e-3)
        model, optimizer = accelerator.prepare(plain, optimizer)
        for x in _batches(device, 8):
            with accelerator.accumulate(model):
                accelerator.backward(model(x).float().square().mean())
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        with attached.sync.consensus():
            _check(plain)
        attached.close()
        for state in (AcceleratorState, GradientState, PartialState):
            state._shared_state.clear()


def lightning(device: torch.device, text: str) -> None:
    """Train by Lightning's Trainer in bfloat16."""
    from lightning.pytorch import LightningModule, Trainer

    from stenograd.lightning import StenogradStrategy

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.inner = _layers(torch.device("cpu"))

        def training_step(self, batch: Tensor, number: int) -> Tensor:
            loss: Tensor = self.inner(batch).float().square().mean()
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    module = Module()
    data: Any = torch.utils.data.DataLoader(torch.cat(_batches(torch.device("cpu"), 6)), batch_size=8)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    with _launched(), tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            accelerator="gpu" if device.type == "cuda" else "cpu",
            devices=1,
            num_nodes=dist.get_world_size(),
            max_epochs=1,
            precision="bf16-mixed",
            strategy=StenogradStrategy(text),
            enable_model_summary=False,
            default_root_dir=folder,
            **quiet,
        )
        trainer.fit(module, data)
    assert all(bool(p.isfinite().all()) for p in module.parameters())


PROGRAMS: dict[str, tuple[Program, tuple[str, ...]]] = {
    "late": (late, (*_EVERY, *_ROUNDS)),
    "own stream": (own_stream, ("dense", "topk:ratio=0.1", "powersgd:rank=2", *_ROUNDS)),
    "amp": (amp, (*_EVERY, *_ROUNDS)),
    "scaled": (scaled, (*_EVERY, "local:every=2")),
    "ddp": (ddp, _EVERY),
    "conv": (conv, (*_EVERY, *_ROUNDS)),
    "types": (types, (*_EVERY, "local:every=2", "diloco:every=4,fragments=2/lowbit")),
    "to memory": (to_memory, ("dense", "topk:ratio=0.1", "powersgd:rank=2", "diloco:every=2")),
    "graphed": (graphed, ("dense", "topk:ratio=0.1")),
    "sharded": (sharded, ("dense", "topk:ratio=0.1", "powersgd:rank=2")),
    "SINGA": (singa, ("update", "update_half", "partial_update", "sparse_update")),
    "MLBench": (mlbench, ("CentralizedSGD", "PowerSGD", "CentralizedSparsifiedSGD")),
    "Heat": (heat, ("DASO", "DataParallel")),
    "Accelerate": (accelerate, ("dense", "topk:ratio=0.1", "local:every=2")),
    "Lightning": (lightning, ("dense", "topk:ratio=0.1", "local:every=2")),
    "compiled": (compiled, ("dense", "topk:ratio=0.1")),
}


def named(*, small: bool) -> dict[str, Callable[[torch.device], None]]:
    """Return every program with every method that suits it, or each with one, by a name for the table."""
    found: dict[str, Callable[[torch.device], None]] = {}
    for name, (program, texts) in PROGRAMS.items():
        if (small and name == "compiled") or not _is_here(name):
            continue  # a compiler takes long, and needs one for C++ on the CPU
        for text in texts[1:2] if small else texts:
            found[f"{name}: {text}"] = partial(_call, program, text)
    return found


def _is_here(name: str) -> bool:
    needed = name.lower() if name in ("Accelerate", "Lightning") else "torch"
    return importlib.util.find_spec(needed) is not None


def _call(program: Program, text: str, device: torch.device) -> None:
    program(device, text)
