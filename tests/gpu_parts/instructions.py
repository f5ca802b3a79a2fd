"""Writes docs/ptx.md: the SASS that each wrapper of cuda/ptx becomes.

python tests/gpu_parts/instructions.py [CUOBJDUMP] compiles one small kernel per wrapper with the
nvcc on the PATH and reads the disassembly.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

from build import CUDA, FLAGS

# In a kernel of (uint32_t a, uint32_t b, uint64_t l, char *g, float x, CUtensorMap m) with
# uint32_t r[4], float f[4] and an out() that keeps a value alive.
SNIPPETS: dict[str, dict[str, str]] = {
    "mbarrier.cuh": {
        "mbarrier_init": "mbarrier_init(a, b);",
        "mbarrier_inval": "mbarrier_inval(a);",
        "fence_mbarrier_init": "fence_mbarrier_init();",
        "mbarrier_arrive": "mbarrier_arrive(a);",
        "mbarrier_arrive_cluster": "mbarrier_arrive_cluster(a);",
        "mbarrier_arrive_cluster_release_cta": "mbarrier_arrive_cluster_release_cta(a);",
        "mbarrier_arrive_expect_tx": "mbarrier_arrive_expect_tx(a, b);",
        "mbarrier_expect_tx": "mbarrier_expect_tx(a, b);",
        "mbarrier_test_wait_parity": "out(mbarrier_test_wait_parity(a, b));",
        "mbarrier_wait_parity": "mbarrier_wait_parity(a, b);",
        "mbarrier_wait_parity, suspend_ns": "mbarrier_wait_parity(a, b, 1000);",
        "mbarrier_wait_parity_cluster": "mbarrier_wait_parity_cluster(a, b);",
    },
    "tma.cuh": {
        "fence_proxy_async_shared_cta": "fence_proxy_async_shared_cta();",
        "fence_proxy_async_global": "fence_proxy_async_global();",
        "fence_proxy_async": "fence_proxy_async();",
        "fence_proxy_tensormap_release_gpu": "fence_proxy_tensormap_release_gpu();",
        "fence_proxy_tensormap_acquire_gpu": "fence_proxy_tensormap_acquire_gpu((CUtensorMap *)g);",
        "prefetch_tensormap": "prefetch_tensormap(&m);",
        "createpolicy_evict_first": "out(createpolicy_evict_first());",
        "cp_async_bulk_load": "cp_async_bulk_load(a, g, b, a);",
        "cp_async_bulk_load_hint": "cp_async_bulk_load_hint(a, g, b, a, l);",
        "cp_async_bulk_load_multicast": "cp_async_bulk_load_multicast(a, g, b, a, 3);",
        "cp_async_bulk_push": "cp_async_bulk_push(a, b, 64, a);",
        "cp_async_bulk_store": "cp_async_bulk_store(g, a, b);",
        "cp_async_bulk_prefetch": "cp_async_bulk_prefetch(g, b);",
        **{
            f"cp_async_bulk_tensor_{n}d_{form}": f"cp_async_bulk_tensor_{n}d_{call};"
            for n, at in ((2, "0, b"), (3, "0, b, 2"), (4, "0, b, 2, 3"), (5, "0, b, 2, 3, 4"))
            for form, call in (
                ("load", f"load(a, &m, b, {at})"),
                ("load_hint", f"load_hint(a, &m, b, {at}, l)"),
                ("load_multicast", f"load_multicast(a, &m, b, {at}, 3)"),
                ("load_multicast_hint", f"load_multicast_hint(a, &m, b, {at}, 3, l)"),
                ("store", f"store(&m, a, {at})"),
            )
        },
        "cp_async_bulk_commit_group": "cp_async_bulk_commit_group();",
        "cp_async_bulk_wait_group": "cp_async_bulk_wait_group<1>();",
        "cp_async_bulk_wait_group_read": "cp_async_bulk_wait_group_read<1>();",
    },
    "cp_async.cuh": {
        "cp_async_16": "cp_async_16(a, g);",
        "cp_async_16_zfill": "cp_async_16_zfill(a, g, b);",
        "cp_async_commit_group": "cp_async_commit_group();",
        "cp_async_wait_group": "cp_async_wait_group<0>();",
        "cp_async_mbarrier_arrive_noinc": "cp_async_mbarrier_arrive_noinc(a);",
    },
    "wgmma.cuh": {
        "wgmma_fence": "wgmma_fence();",
        **{
            f"{name} n{n} {dtype}": f"float d[{n // 2}]; wgmma_fence(); {call}"
            f" wgmma_commit_group(); wgmma_wait_group<0>(); register_fence(d); for (float v : d) out(v);"
            for n in (16, 32, 64, 128)
            for dtype, t in (("bf16", "__nv_bfloat16"), ("f16", "__half"))
            for name, call in (
                ("wgmma_ss K, K", f"wgmma_ss_first<{t}, Major::K, Major::K>(d, l, l + 2);"),
                ("wgmma_ss MN, MN", f"wgmma_ss_first<{t}, Major::MN, Major::MN>(d, l, l + 2);"),
                ("wgmma_rs MN", f"wgmma_rs_first<{t}, Major::MN>(d, r, l);"),
            )
        },
    },
    "mma.cuh": {
        "mma_m16n8k16 bf16": "mma_m16n8k16<__nv_bfloat16>(f, r, a, b); out(f[0]);",
        "mma_m16n8k16 f16": "mma_m16n8k16<__half>(f, r, a, b); out(f[0]);",
        **{
            f"mma_m16n8k8 {dtype}": f"uint32_t p[2] = {{a, b}}; mma_m16n8k8<{t}>(f, p, b); out(f[0]);"
            for dtype, t in (("bf16", "__nv_bfloat16"), ("f16", "__half"))
        },
        "mma_m16n8k8_tf32": "mma_m16n8k8_tf32(f, r, a, b); out(f[0]);",
        **{
            f"{name}_x{n}{t}": f"uint32_t s[{n}] = {{}}; {call}"
            for n in (1, 2, 4)
            for t in ("", "_trans")
            for name, call in (
                ("ldmatrix", f"ldmatrix_x{n}{t}(s, a); for (uint32_t v : s) out(v);"),
                ("stmatrix", f"stmatrix_x{n}{t}(a, s);"),
            )
        },
        "movmatrix_trans": "out(movmatrix_trans(a));",
    },
    "cta.cuh": {
        "bar_sync": "bar_sync(1, 64);",
        "bar_arrive": "bar_arrive(1, 64);",
        "elect_sync": "out(elect_sync());",
        "setmaxnreg_inc": "setmaxnreg_inc<232>();",
        "setmaxnreg_dec": "setmaxnreg_dec<40>();",
        "cluster_ctarank": "out(cluster_ctarank());",
        "cluster_nctarank": "out(cluster_nctarank());",
        "barrier_cluster_arrive": "barrier_cluster_arrive();",
        "barrier_cluster_arrive_relaxed": "barrier_cluster_arrive_relaxed();",
        "barrier_cluster_wait": "barrier_cluster_wait();",
        "mapa": "out(mapa(a, b));",
        "st_shared_cluster_u32": "st_shared_cluster_u32(a, b);",
        "ld_shared_cluster_u32": "out(ld_shared_cluster_u32(a));",
        "st_async_v4_u32": "st_async_v4_u32(a, uint4{a, b, a, b}, b);",
        "griddepcontrol_wait": "griddepcontrol_wait();",
        "griddepcontrol_launch_dependents": "griddepcontrol_launch_dependents();",
    },
    "math.cuh": {
        "ex2_approx_ftz": "out(ex2_approx_ftz(x));",
        "lg2_approx_ftz": "out(lg2_approx_ftz(x));",
        "rcp_approx_ftz": "out(rcp_approx_ftz(x));",
        "rsqrt_approx_ftz": "out(rsqrt_approx_ftz(x));",
        "tanh_approx": "out(tanh_approx(x));",
        "cvt_rn_bf16x2": "out(cvt_rn_bf16x2(x, 1.f));",
        "cvt_rn_f16x2": "out(cvt_rn_f16x2(x, 1.f));",
        "cvt_rna_tf32": "out(cvt_rna_tf32(x));",
        "mul_rn_bf16x2": "out(mul_rn_bf16x2(a, b));",
        "mul_rn_f16x2": "out(mul_rn_f16x2(a, b));",
    },
    "shared.cuh": {
        "ld_shared_u32": "out(ld_shared_u32(a));",
        "ld_shared_v4_f32": "float4 v = ld_shared_v4_f32(a); out(v.x + v.y + v.z + v.w);",
        "ld_shared_v2_u32": "uint2 v = ld_shared_v2_u32(a); out(v.x + v.y);",
        "st_shared_v2_u32": "st_shared_v2_u32(a, uint2{a, b});",
        "st_shared_u16": "st_shared_u16(a, 1);",
        "st_shared_v4_u32": "st_shared_v4_u32(a, uint4{a, b, a, b});",
    },
}

# What any kernel consists of: addresses, constants, arguments, results and the end.
PLUMBING = re.compile(
    r"^(LDC|ULDC|MOV|UMOV|IMAD|UIMAD|S2R|S2UR|CS2R|R2UR|EXIT|BRA|NOP|STG|IADD3|UIADD3|LEA|ULEA|"
    r"SHF|USHF|LOP3|ULOP3|SEL|ISETP|UISETP|FADD|PRMT|UPRMT|WARPSYNC|BSYNC|BSSY|PLOP3|UPLOP3|SETCTAID)\b"
)


def source() -> str:
    """One kernel per snippet, k_0, k_1, ..."""
    parts = [f'#include "ptx/{header}"' for header in SNIPPETS]
    parts.append("using namespace linattn::ptx;")
    snippets = [body for group in SNIPPETS.values() for body in group.values()]
    for i, body in enumerate(snippets):
        parts.append(
            f'extern "C" __global__ void __launch_bounds__(384, 1) k_{i}(uint32_t a, uint32_t b, '
            "uint64_t l, char *g, float x, const __grid_constant__ CUtensorMap m) {\n"
            "    [[maybe_unused]] uint32_t r[4] = {a, b, a, b}; int n = 0;\n"
            "    [[maybe_unused]] float f[4] = {x, x, x, x};\n"
            "    [[maybe_unused]] auto out = [&](auto v) {\n"
            "        reinterpret_cast<decltype(v) volatile *>(g)[n++] = v; };\n"
            f"    {body}\n}}"
        )
    return "\n".join(parts)


def mnemonics(cuobjdump: str) -> dict[int, list[str]]:
    """The instructions of each kernel that are not plumbing, in order, repeats dropped."""
    with tempfile.TemporaryDirectory() as name:
        text, cubin = Path(name) / "wrappers.cu", Path(name) / "wrappers.cubin"
        text.write_text(source())
        subprocess.run(["nvcc", *FLAGS, "-cubin", "-o", str(cubin), str(text)], check=True)
        command = [cuobjdump, "--dump-sass", str(cubin)]
        sass = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found: dict[int, list[str]] = {}
    kernel: list[str] = []
    names = [name for group in SNIPPETS.values() for name in group]
    for line in sass.splitlines():
        if match := re.search(r"Function : k_(\d+)", line):
            kernel = found.setdefault(int(match[1]), [])
            multiplies = names[int(match[1])].startswith("mul_")  # elsewhere HFMA2 loads a constant
        elif match := re.match(
            r"\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\d+ )?([A-Z0-9_.a-z]+)([^;]*);", line
        ):
            word = match[1]
            if word.startswith("HGMMA"):
                word += "".join(re.findall(r"\.tnsp[AB]", match[2]))
            plumbing = PLUMBING.match(word) or (word.startswith("HFMA2") and not multiplies)
            if not plumbing and word not in kernel:
                kernel.append(word)
    return found


def main() -> None:
    found = mnemonics(sys.argv[1] if len(sys.argv) > 1 else "cuobjdump")
    version = subprocess.run(["nvcc", "--version"], capture_output=True, text=True).stdout
    release = re.search(r"V([\d.]+)", version)[1]
    lines = [
        "# Instruction wrappers and what they become",
        "",
        f"Read from nvcc {release}, sm_90a, by `tests/gpu_parts/instructions.py`; do not edit.",
        "Address arithmetic, argument loads and result stores are left out. Each wrapper's comment in",
        "`cuda/ptx/` says what it does not guarantee.",
        "",
        "`python tests/gpu_parts/build.py LIBRARY` builds small kernels around the wrappers, which",
        "`PYLINATTN_PARTS=LIBRARY pytest tests/gpu_parts` runs on the card against NumPy.",
    ]
    index = 0
    for header, group in SNIPPETS.items():
        lines += ["", f"## {header}", "", "| wrapper | SASS |", "|---|---|"]
        for name in group:
            words = ", ".join(f"`{w}`" for w in found[index]) or "register moves only"
            lines.append(f"| `{name}` | {words} |")
            index += 1
    target = CUDA.parent / "docs" / "ptx.md"
    target.parent.mkdir(exist_ok=True)
    target.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
