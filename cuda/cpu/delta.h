// The CPU backend's ops; ops.h says what they compute.
#pragma once
#include <cstdint>

#include "../ops.h"

namespace linattn::cpu {

constexpr int64_t kMaxHead = 256;  // largest K and V
constexpr int64_t kMaxVerifyTokens = 16;

const char *gdn_fwd(const DeltaParams &p);
const char *kda_fwd(const DeltaParams &p);
const char *gdn_decode(const DeltaParams &p);
const char *kda_decode(const DeltaParams &p);
const char *gdn_verify(const DeltaParams &p);
const char *kda_verify(const DeltaParams &p);
const char *delta_commit(const CommitParams &p);

// The recurrence behind the six, and the replay behind delta_commit, in float or double.
template <class Real>
void run_delta(const DeltaParams &p);
template <class Real>
void run_commit(const CommitParams &p);

extern template void run_delta<float>(const DeltaParams &);
extern template void run_delta<double>(const DeltaParams &);
extern template void run_commit<float>(const CommitParams &);
extern template void run_commit<double>(const CommitParams &);

}  // namespace linattn::cpu
