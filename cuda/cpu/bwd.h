// The CPU backend's gradients and affine maps; ops.h says what they compute.
#pragma once
#include "../ops.h"

namespace linattn::cpu {

const char *gdn_bwd(const BwdParams &p);
const char *kda_bwd(const BwdParams &p);
const char *gdn_segment(const SegmentParams &p);
const char *kda_segment(const SegmentParams &p);
const char *segment_merge(const MergeParams &p);

// In float or double.
template <class Real>
void run_bwd(const BwdParams &p);
template <class Real>
void run_segment(const SegmentParams &p);
template <class Real>
void run_merge(const MergeParams &p);

extern template void run_bwd<float>(const BwdParams &);
extern template void run_bwd<double>(const BwdParams &);
extern template void run_segment<float>(const SegmentParams &);
extern template void run_segment<double>(const SegmentParams &);
extern template void run_merge<float>(const MergeParams &);
extern template void run_merge<double>(const MergeParams &);

}  // namespace linattn::cpu
