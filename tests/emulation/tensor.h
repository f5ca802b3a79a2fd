// A kernel's tensor over a test's memory.
#pragma once
#include <vector>

#include "ops.h"

inline linattn::Tensor tens(void *d, linattn::DType t, std::vector<int64_t> st) {
    linattn::Tensor r;
    r.data = (char *)d;
    r.dtype = t;
    for (size_t i = 0; i < st.size(); i++) r.stride[i] = st[i];
    return r;
}
