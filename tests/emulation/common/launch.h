#pragma once
#include "emu.h"
namespace linattn::cuda {
struct Extent {
    int64_t x = 1, y = 1, z = 1;
};
struct LaunchConfig {
    Extent grid, block, cluster;
    int64_t smem_bytes = 0;
    cudaStream_t stream = nullptr;
    bool programmatic = false;
};
template <class... P, class... A>
void launch(const char *name, void (*kernel)(P...), const LaunchConfig &c, A &&...a) {
    if (c.smem_bytes > 232448) {
        fprintf(stderr, "smem %ld\n", (long)c.smem_bytes);
        abort();
    }
    if (getenv("EMU_NAMES")) fprintf(stderr, "%s x %ld\n", name, (long)(c.grid.x * c.grid.y));
    emu::grid.y = c.grid.y;
    for (emu::block.y = 0; emu::block.y < c.grid.y; emu::block.y++) emu::run(c.grid.x, c.block.x, [&] { kernel(a...); }, name);
}
}  // namespace linattn::cuda
