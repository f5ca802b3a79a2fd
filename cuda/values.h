// Checks of values: lengths, indices, gates. Made where the host can read them, and on a GPU when `checked` asks for it.
#pragma once
#include "ops.h"

namespace linattn {

void check_values(const char *op, const DeltaParams &p, bool on_gpu, bool checked);
void check_values(const char *op, const CommitParams &p, bool on_gpu, bool checked);

}  // namespace linattn
