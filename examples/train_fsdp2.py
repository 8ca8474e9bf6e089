"""Train a small character-level transformer under FSDP2: save on N ranks, resume on M.

    torchrun --standalone --nproc-per-node=2 examples/train_fsdp2.py --checkpoint out/step40 --save-at 40
    torchrun --standalone --nproc-per-node=4 examples/train_fsdp2.py --checkpoint out/step40 --resume

The text is the source of the Python standard library. What shardopt adds to a training script is its import and the
one line that wraps the optimizer; saving and loading are torch's own. Runs on GPUs over NCCL when every process of
this machine can have one, else on CPUs over gloo.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sysconfig
import time
from array import array
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import shardopt

END_OF_FILE = 256  # follows each file; the other tokens are the byte values
VOCABULARY = 257  # does not divide evenly over 2 or 4 ranks, so two of the weights are sharded unevenly


class Block(nn.Module):
    """One pre-norm transformer block with causal attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """[batch, time, width] -> the same shape."""
        batch, time, width = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(batch, time, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)  # each [batch, heads, time, width / heads]
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attention_out(attended.transpose(1, 2).reshape(batch, time, width))
        return x + self.mlp(self.mlp_norm(x))


class Transformer(nn.Module):
    """A language model over tokens."""

    def __init__(self, *, width: int, heads: int, depth: int, context: int) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, width)
        self.position = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Tokens and the tokens that follow them, each [batch, time] int64 -> mean cross-entropy, a scalar."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.token(tokens) + self.position(positions)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))  # [batch, time, VOCABULARY]
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def read_corpus() -> Tensor:
    """The standard library's top-level modules in name order, as one int16 tensor of tokens."""
    folder = Path(sysconfig.get_path("stdlib"))
    files = sorted(folder.glob("*.py"))
    if not files:
        raise FileNotFoundError(f"{folder}: no .py files; this Python came without its library's source")
    tokens = array("h")
    for file in files:
        tokens.extend(file.read_bytes())
        tokens.append(END_OF_FILE)
    return torch.frombuffer(tokens, dtype=torch.int16)


def local_batch(corpus: Tensor, *, step: int, batch: int, context: int) -> tuple[Tensor, Tensor]:
    """This rank's inputs and targets in `step`, each [batch / world size, context], int64.

    The global batch depends on the step alone, so a resumed run sees the text that the interrupted one would have
    seen, in the same order, on any number of ranks.
    """
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(len(corpus) - context, (batch,), generator=generator)
    mine = starts.chunk(dist.get_world_size())[dist.get_rank()]
    windows = corpus[mine[:, None] + torch.arange(context + 1)].long()
    return windows[:, :-1], windows[:, 1:]


def global_mean(loss: Tensor) -> float:
    """Collective. The mean of the ranks' losses; their parts of the batch are equally large."""
    total = loss.detach().clone()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def digest(state: Mapping[str, Tensor]) -> str:
    """Collective. SHA-256 over the keys and the gathered bytes: the same on any number of ranks for equal state."""
    sha = hashlib.sha256()
    for key in sorted(state):
        value = state[key]
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        sha.update(f"{key} {tuple(whole.shape)} {whole.dtype}".encode())
        sha.update(whole.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()


class Log:
    """Rank 0's events, printed and written to a file as one JSON object a line; silent on every other rank."""

    def __init__(self, path: Path | None) -> None:
        self._speaks = dist.get_rank() == 0
        self._file = path.open("w", encoding="utf-8") if self._speaks and path else None

    def event(self, name: str, **values: object) -> None:
        """Reports one event with its values, which JSON can hold."""
        if self._speaks:
            shown = (f"{value:.6g}" if isinstance(value, float) else str(value) for value in values.values())
            print(f"{name:8}", *(f"{key}={value}" for key, value in zip(values, shown, strict=True)), flush=True)
        if self._file:
            print(json.dumps({"event": name, **values}), file=self._file, flush=True)


def start(device_type: str | None) -> torch.device:
    """Collective. Joins the process group and returns this rank's device."""
    if device_type is None:
        enough = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
        device_type = "cuda" if enough else "cpu"
    if device_type == "cpu":
        dist.init_process_group("gloo")
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    return device


def build_model(options: argparse.Namespace, device: torch.device) -> Transformer:
    """Collective. Every rank builds the same model from the seed, then keeps its shard of it."""
    torch.manual_seed(options.seed)
    model = Transformer(width=options.width, heads=options.heads, depth=options.depth, context=options.context)
    model.to(device, getattr(torch, options.dtype))
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def train(options: argparse.Namespace, device: torch.device, log: Log) -> None:
    """Collective. Trains up to `options.steps`; saves or resumes on the way as the options say."""
    model = build_model(options, device)
    optimizer = shardopt.ShardedStateOptimizer(torch.optim.AdamW(model.parameters(), lr=options.lr), model)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=options.steps, eta_min=options.lr / 10)
    training = {"model": model, "optim": optimizer, "scheduler": scheduler}
    parameters = sum(parameter.numel() for parameter in model.parameters())
    log.event("started", ranks=dist.get_world_size(), device=device.type, dtype=options.dtype, parameters=parameters)

    if options.resume:
        began = time.perf_counter()
        dcp.load(training, checkpoint_id=options.checkpoint)
        seconds = time.perf_counter() - began
        log.event("resumed", step=scheduler.last_epoch, seconds=seconds, digest=digest(optimizer.sharded_state()))

    corpus = read_corpus()
    for step in range(scheduler.last_epoch + 1, options.steps + 1):
        began = time.perf_counter()
        inputs, targets = local_batch(corpus, step=step, batch=options.batch, context=options.context)
        loss = model(inputs.to(device), targets.to(device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        log.event("trained", step=step, loss=global_mean(loss), seconds=time.perf_counter() - began)

        if step == options.save_at:
            began = time.perf_counter()
            dcp.save(training, checkpoint_id=options.checkpoint)
            seconds = time.perf_counter() - began
            log.event("saved", step=step, seconds=seconds, digest=digest(optimizer.sharded_state()))


def parse_options() -> argparse.Namespace:
    """The command line's options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, required=True, help="the checkpoint's folder")
    parser.add_argument("--save-at", type=int, metavar="STEP", help="save after this step, and train on")
    parser.add_argument("--resume", action="store_true", help="start from the checkpoint")
    parser.add_argument("--steps", type=int, default=80, help="the step to train up to (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=16, help="windows in the global batch (default: %(default)s)")
    parser.add_argument("--context", type=int, default=32, help="tokens in a window (default: %(default)s)")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--depth", type=int, default=2)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", choices=["float32", "float64"], default="float32")
    parser.add_argument("--device", choices=["cpu", "cuda"], help="default: cuda if every process can have a GPU")
    parser.add_argument("--events", type=Path, help="write rank 0's events to this file, one JSON object a line")
    options = parser.parse_args()
    if options.save_at is not None and not 1 <= options.save_at <= options.steps:
        parser.error(f"--save-at {options.save_at} is not one of the steps 1 to {options.steps}")
    if options.batch % int(os.environ.get("WORLD_SIZE", "1")):
        parser.error(f"--batch {options.batch} does not divide over {os.environ['WORLD_SIZE']} ranks")
    return options


def main() -> None:
    """Collective. Runs the training that the command line asks for."""
    options = parse_options()
    device = start(options.device)
    train(options, device, Log(options.events))
    # While the ranks wait here, gloo's threads let go of their last tensors. Torch aborts a process whose interpreter
    # ends while one of them still has to.
    dist.barrier()
    time.sleep(0.1)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
