"""A small language model of GDN and KDA layers, trained on the text that Python carries, then asked to write.

Trained twice from the same weights on the same batches: through pylinattn.torch and through a token loop in plain
torch. Both loss curves go into one picture if matplotlib is there. Text is then generated with the decode ops, the
states updated in place. A few minutes on two CPU cores, `--steps 50` for a look; `--device cuda` on a GPU, where our path
takes q, k and v in bf16 and the loop stays in float32.
"""

from __future__ import annotations

import argparse
import ast
import pathlib
import sysconfig
import time

import torch
from torch import nn
from torch.nn import functional as F

import pylinattn
from pylinattn.torch import chunk_gated_delta_rule, chunk_kda, fused_gdn_gate, fused_kda_gate

DIM, HEADS, HEAD, LAYERS = 64, 2, 32, 4
HEAD_ON_GPU = 64
BATCH, TOKENS = 8, 128


def python_text():
    """The licence, if it is installed, and the docstrings of the standard library, as bytes."""
    library = pathlib.Path(sysconfig.get_path("stdlib"))
    pieces = [p.read_text() for p in (library / "LICENSE.txt", library / "LICENSE") if p.exists()]
    for path in sorted(library.glob("*.py")):
        try:
            tree = ast.parse(path.read_text())
        except (SyntaxError, UnicodeDecodeError):
            continue
        kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
        nodes = (node for node in ast.walk(tree) if isinstance(node, kinds))
        pieces += filter(None, map(ast.get_docstring, nodes))
    return torch.tensor(list("\n\n".join(pieces).encode()), dtype=torch.uint8)


def token_loop(q, k, v, g, beta):
    """S = exp(g) S;  u = beta (v - S'k);  S = S + k u';  o = scale S'q, in plain torch."""
    decay = (g if g.ndim == 4 else g[..., None]).exp()
    S = v.new_zeros(v.shape[0], v.shape[2], k.shape[3], v.shape[3])
    outputs = []
    for t in range(q.shape[1]):
        S = S * decay[:, t, :, :, None]
        u = beta[:, t, :, None] * (v[:, t] - (S * k[:, t, ..., None]).sum(2))
        S = S + k[:, t, ..., None] * u[:, :, None]
        outputs.append((S * q[:, t, ..., None]).sum(2))
    return torch.stack(outputs, 1) * q.shape[3] ** -0.5


class DeltaLayer(nn.Module):
    """Projections, the delta rule with everything activated inside the kernel, output gate."""

    def __init__(self, per_channel):
        super().__init__()
        self.per_channel = per_channel
        self.norm = nn.RMSNorm(DIM)
        gates = HEADS * HEAD if per_channel else HEADS
        self.sizes = [HEADS * HEAD] * 4 + [gates, HEADS]
        self.project = nn.Linear(DIM, sum(self.sizes), bias=False)
        self.A_log = nn.Parameter(torch.linspace(-2, 1, HEADS))
        self.dt_bias = nn.Parameter(torch.full((gates,), -2.0))
        self.out_norm = nn.RMSNorm(HEAD)
        self.out = nn.Linear(HEADS * HEAD, DIM, bias=False)

    def forward(self, x, rule):
        """`rule` is the delta rule: a function of the layer and q, k, v, g, beta."""
        parts = self.project(self.norm(x)).split(self.sizes, -1)
        q, k, v, gate = (p.unflatten(-1, (HEADS, HEAD)) for p in parts[:4])
        g = parts[4].unflatten(-1, (HEADS, HEAD)) if self.per_channel else parts[4]
        o = rule(self, q, k, v, g, parts[5])
        return x + self.out((self.out_norm(o) * F.silu(gate)).flatten(-2))


def in_kernel_dtype(*arrays):
    return [x.bfloat16() if x.is_cuda else x for x in arrays]


def ours(layer, q, k, v, g, beta):
    function = chunk_kda if layer.per_channel else chunk_gated_delta_rule
    return function(
        *in_kernel_dtype(q, k, v), g, beta, use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True,
        use_beta_sigmoid_in_kernel=True, A_log=layer.A_log, dt_bias=layer.dt_bias,
    )[0].float()  # fmt: skip


def plain(layer, q, k, v, g, beta):
    q, k = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (q, k))
    gate = fused_kda_gate if layer.per_channel else fused_gdn_gate
    return token_loop(q, k, v, gate(g, layer.A_log, layer.dt_bias), beta.sigmoid())


class Decoder:
    """The delta rule against one state per layer, updated in place: prompts and single tokens alike."""

    def __init__(self):
        self.states = {}

    def __call__(self, layer, q, k, v, g, beta):
        if layer not in self.states:
            self.states[layer] = q.new_zeros(q.shape[0], HEADS, HEAD, HEAD, dtype=torch.float32)
        bias = layer.dt_bias.view(HEADS, HEAD) if layer.per_channel else layer.dt_bias
        decode = pylinattn.kda_decode if layer.per_channel else pylinattn.gdn_decode
        return decode(
            *in_kernel_dtype(q, k, v), g, beta, self.states[layer], A_log=layer.A_log, dt_bias=bias,
            qk_l2norm=True, gate="softplus", beta_form="logits",
        ).float()  # fmt: skip


class Block(nn.Module):
    def __init__(self, per_channel):
        super().__init__()
        self.delta = DeltaLayer(per_channel)
        self.mlp = nn.Sequential(
            nn.RMSNorm(DIM), nn.Linear(DIM, 3 * DIM), nn.SiLU(), nn.Linear(3 * DIM, DIM)
        )

    def forward(self, x, rule):
        x = self.delta(x, rule)
        return x + self.mlp(x)


class TinyLM(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(256, DIM)
        self.blocks = nn.ModuleList(Block(per_channel=i % 2 == 1) for i in range(LAYERS))
        self.head = nn.Sequential(nn.RMSNorm(DIM), nn.Linear(DIM, 256, bias=False))

    def forward(self, ids, rule):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x, rule)
        return self.head(x)


def train(text, rule, steps, device):
    torch.manual_seed(0)
    model = TinyLM().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=steps)
    batches = torch.Generator().manual_seed(1)
    losses, started = [], time.perf_counter()
    for step in range(steps):
        at = torch.randint(len(text) - TOKENS - 1, (BATCH, 1), generator=batches)
        ids = text[at + torch.arange(TOKENS + 1)].long().to(device)
        logits = model(ids[:, :-1], rule)
        loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
        if step % 50 == 49:
            mean = sum(losses[-50:]) / 50
            print(f"  step {step + 1}: loss {mean:.3f}, {time.perf_counter() - started:.0f} s")
    return model, losses


@torch.no_grad()
def generate(model, prompt, count):
    random, decoder = torch.Generator().manual_seed(0), Decoder()
    device = model.embed.weight.device
    ids = torch.tensor([list(prompt.encode())], device=device)
    written = []
    for _ in range(count):
        weights = (model(ids, decoder)[0, -1] / 0.7).softmax(-1).cpu()
        ids = torch.multinomial(weights, 1, generator=random)[None].to(device)
        written.append(ids.item())
    return prompt + bytes(written).decode(errors="replace")


def draw(curves, path):
    try:
        from matplotlib import pyplot
    except ImportError:
        print("no picture: matplotlib is not installed")
        return
    figure, axes = pyplot.subplots(figsize=(7, 4))
    for (label, losses), style in zip(curves.items(), ("-", "--")):
        axes.plot(losses, style, label=label, linewidth=1)
    axes.set(xlabel="step", ylabel="loss, nats per byte")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    print(f"loss curves: {path}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--picture", default="tiny_lm.png")
    parser.add_argument("--write", type=int, default=400, help="bytes to generate")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    options = parser.parse_args()
    if options.device == "cuda":
        global HEAD
        HEAD = HEAD_ON_GPU  # 64 and 128 are what the kernels take
    text = python_text()
    print(f"{len(text)} bytes of text")
    curves = {}
    for label, rule in (("plain torch, token loop", plain), ("pylinattn", ours)):
        print(label)
        model, curves[label] = train(text, rule, options.steps, options.device)
    a, b = (torch.tensor(losses) for losses in curves.values())
    last = max(1, options.steps // 10)
    print(
        f"loss of the last {last} steps: {a[-last:].mean():.4f} and {b[-last:].mean():.4f}; "
        f"largest difference at a step {(a - b).abs().max():.2e}"
    )
    draw(curves, options.picture)
    print(generate(model, "Return the ", options.write))


if __name__ == "__main__":
    main()
