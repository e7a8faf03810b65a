// ptx.h: one wrapper for each PTX instruction that sm_90a and later architectures have, with memory
// order and scope in its name.
#pragma once

#include "protocol/platform.h"

namespace jax_megamoe::gpu {

#define JMM_DEVICE __device__ __forceinline__

// ---- loads, stores and atomics that order memory ----

JMM_DEVICE uint32_t ld_acquire_gpu(const uint32_t* p) {
  uint32_t v;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
JMM_DEVICE uint64_t ld_acquire_gpu(const uint64_t* p) {
  uint64_t v;
  asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
}
JMM_DEVICE uint64_t ld_acquire_sys(const uint64_t* p) {
  uint64_t v;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
}
JMM_DEVICE uint32_t ld_relaxed_gpu(const uint32_t* p) {
  uint32_t v;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
JMM_DEVICE uint64_t ld_relaxed_gpu(const uint64_t* p) {
  uint64_t v;
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
}
// Loads 16 bytes of a row that no other SM writes in this call any more.
JMM_DEVICE uint4 ld_global_v4(const void* p) {
  uint4 v;
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p)
               : "memory");
  return v;
}
JMM_DEVICE void st_release_sys(uint64_t* p, uint64_t v) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}
JMM_DEVICE void red_add_release_gpu(uint32_t* p, uint32_t v) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
JMM_DEVICE void red_add_release_sys(uint64_t* p, uint64_t v) {
  asm volatile("red.release.sys.global.add.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}
JMM_DEVICE uint32_t atom_add_relaxed_gpu(uint32_t* p, uint32_t v) {
  uint32_t old;
  asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], %2;"
               : "=r"(old)
               : "l"(p), "r"(v)
               : "memory");
  return old;
}
JMM_DEVICE uint32_t atom_or_acq_rel_gpu(uint32_t* p, uint32_t v) {
  uint32_t old;
  asm volatile("atom.acq_rel.gpu.global.or.b32 %0, [%1], %2;"
               : "=r"(old)
               : "l"(p), "r"(v)
               : "memory");
  return old;
}
JMM_DEVICE void fence_acq_rel_sys() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }
// Orders ordinary accesses of global memory with those of the bulk copy engine.
JMM_DEVICE void fence_proxy_async_global() {
  asm volatile("fence.proxy.async.global;" ::: "memory");
}

// The same for this CTA's shared memory.
JMM_DEVICE void fence_proxy_async_shared() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// ---- shared memory ----

JMM_DEVICE uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}
JMM_DEVICE uint32_t ld_shared_u32(uint32_t a) {
  uint32_t v;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(a));
  return v;
}
JMM_DEVICE uint2 ld_shared_v2(uint32_t a) {
  uint2 v;
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(a));
  return v;
}
JMM_DEVICE uint4 ld_shared_v4(uint32_t a) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(a));
  return v;
}
// Loads from a table that never changes, so the compiler may move or drop it.
JMM_DEVICE uint2 ld_shared_constant_v2(uint32_t a) {
  uint2 v;
  asm("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(a));
  return v;
}
JMM_DEVICE void st_shared_u16(uint32_t a, uint32_t v) {
  asm volatile("st.shared.u16 [%0], %1;" ::"r"(a), "h"(static_cast<uint16_t>(v)) : "memory");
}
JMM_DEVICE void st_shared_u32(uint32_t a, uint32_t v) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(a), "r"(v) : "memory");
}
// Four 8x8 matrices of 16-bit elements; lane l gives the address of row l % 8 of matrix l / 8. The
// fragments hold the matrices' columns.
JMM_DEVICE void stmatrix_x4_trans(uint32_t a, uint32_t v0, uint32_t v1, uint32_t v2, uint32_t v3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(a),
               "r"(v0), "r"(v1), "r"(v2), "r"(v3)
               : "memory");
}
JMM_DEVICE void stmatrix_x2_trans(uint32_t a, uint32_t v0, uint32_t v1) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(a), "r"(v0),
               "r"(v1)
               : "memory");
}
JMM_DEVICE void stmatrix_x1_trans(uint32_t a, uint32_t v0) {
  asm volatile("stmatrix.sync.aligned.m8n8.x1.trans.shared.b16 [%0], {%1};" ::"r"(a), "r"(v0)
               : "memory");
}

// ---- barriers within the CTA ----

JMM_DEVICE void mbarrier_init(uint32_t bar, uint32_t count) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(bar), "r"(count) : "memory");
}
JMM_DEVICE void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
JMM_DEVICE void mbarrier_arrive(uint32_t bar) {
  asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(bar) : "memory");
}
JMM_DEVICE void mbarrier_arrive_expect_tx(uint32_t bar, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes)
               : "memory");
}
// compute-sanitizer's racecheck takes an arrival to stand for the arriving thread alone, though
// __syncwarp orders the others' accesses before it, and the bytes of a bulk copy for a write of the
// thread that has started it. In a build for it every lane arrives, and copies are made by loads
// and stores, so that what it reports is about the kernel.
inline constexpr bool kRacecheck = JMM_RACECHECK;
inline constexpr uint32_t kArrivalsOfWarp = kRacecheck ? 32 : 1;
JMM_DEVICE bool mbarrier_try_wait_parity(uint32_t bar, uint32_t parity) {
  uint32_t done;
  asm volatile(
      "{\n.reg .pred p;\n"
      "mbarrier.try_wait.parity.shared.b64 p, [%1], %2;\n"
      "selp.u32 %0, 1, 0, p;\n}\n"
      : "=r"(done)
      : "r"(bar), "r"(parity)
      : "memory");
  return done != 0;
}
// Waits for a phase, at most `timeout_ns`, or until the word `failed` is not zero; on a timeout
// sets it to 1 and stores `bar` and `parity` behind it. One block of assembly, because the compiler
// serialises tensor-core work around a loop that it has to take for divergent.
JMM_DEVICE void mbarrier_wait_parity_bounded(uint32_t bar, uint32_t parity, uint32_t failed,
                                             uint64_t timeout_ns) {
  asm volatile(
      "{\n.reg .pred p;\n.reg .u32 f;\n.reg .u64 begin, now;\n"
      "mbarrier.try_wait.parity.shared.b64 p, [%0], %1;\n"
      "@p bra DONE;\n"
      "mov.u64 begin, %%globaltimer;\n"
      "AGAIN:\n"
      "mbarrier.try_wait.parity.shared.b64 p, [%0], %1;\n"
      "@p bra DONE;\n"
      "ld.volatile.shared.u32 f, [%2];\n"
      "setp.ne.u32 p, f, 0;\n"
      "@p bra DONE;\n"
      "mov.u64 now, %%globaltimer;\n"
      "sub.u64 now, now, begin;\n"
      "setp.lt.u64 p, now, %3;\n"
      "@p bra AGAIN;\n"
      "st.volatile.shared.u32 [%2 + 4], %0;\n"
      "st.volatile.shared.u32 [%2 + 8], %1;\n"
      "st.volatile.shared.u32 [%2], 1;\n"
      "DONE:\n}\n" ::"r"(bar),
      "r"(parity), "r"(failed), "l"(timeout_ns)
      : "memory");
}
JMM_DEVICE void named_barrier_sync(uint32_t id, uint32_t threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
// Does the same, and tells all of the threads whether any one's `value` is true.
JMM_DEVICE bool named_barrier_or(uint32_t id, uint32_t threads, bool value) {
  uint32_t any;
  asm volatile(
      "{\n.reg .pred own, all;\n"
      "setp.ne.u32 own, %3, 0;\n"
      "bar.red.or.pred all, %1, %2, own;\n"
      "selp.u32 %0, 1, 0, all;\n}\n"
      : "=r"(any)
      : "r"(id), "r"(threads), "r"(static_cast<uint32_t>(value))
      : "memory");
  return any != 0;
}

// ---- bulk copy ----

// Global to shared memory; its bytes complete on the mbarrier. 16-byte sizes and addresses. One
// thread; in racecheck's build `lanes` of them copy, of which this is `lane`.
JMM_DEVICE void bulk_load(uint32_t dst, const void* src, uint32_t bytes, uint32_t bar,
                          uint32_t lane = 0, uint32_t lanes = 1) {
  if constexpr (kRacecheck) {
    for (uint32_t i = lane * 16; i < bytes; i += lanes * 16) {
      const uint4 v = ld_global_v4(static_cast<const uint8_t*>(src) + i);
      asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(dst + i), "r"(v.x), "r"(v.y),
                   "r"(v.z), "r"(v.w)
                   : "memory");
    }
    return;
  }
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(dst),
      "l"(src), "r"(bytes), "r"(bar)
      : "memory");
}
JMM_DEVICE void bulk_prefetch_l2(const void* src, uint32_t bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(src), "r"(bytes) : "memory");
}

// ---- registers of a warpgroup ----

template <uint32_t N>
JMM_DEVICE void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}
template <uint32_t N>
JMM_DEVICE void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}

// ---- arithmetic ----

JMM_DEVICE uint32_t prmt(uint32_t a, uint32_t b, uint32_t selector) {
  uint32_t v;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(v) : "r"(a), "r"(b), "r"(selector));
  return v;
}
JMM_DEVICE uint32_t mul_bf16x2(uint32_t a, uint32_t b) {
  uint32_t v;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(v) : "r"(a), "r"(b));
  return v;
}
JMM_DEVICE uint32_t max_s16x2(uint32_t a, uint32_t b) { return __vmaxs2(a, b); }
// A NaN stays a NaN.
JMM_DEVICE float min_nan(float a, float b) {
  float v;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(v) : "f"(a), "f"(b));
  return v;
}
JMM_DEVICE float max_nan(float a, float b) {
  float v;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(v) : "f"(a), "f"(b));
  return v;
}
// Two floats to E4M3, low byte from `low`; round to nearest even, saturating.
JMM_DEVICE uint32_t cvt_e4m3x2(float low, float high) {
  uint16_t v;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(v) : "f"(high), "f"(low));
  return v;
}
// Two E4M3 codes (16 bits) to two floats; exact.
JMM_DEVICE float2 cvt_f32x2_e4m3x2(uint32_t codes) {
  uint32_t half2;
  float2 v;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(half2) : "h"(static_cast<uint16_t>(codes)));
  asm("{\n.reg .b16 lo, hi;\nmov.b32 {lo, hi}, %2;\ncvt.f32.f16 %0, lo;\ncvt.f32.f16 %1, hi;\n}\n"
      : "=f"(v.x), "=f"(v.y)
      : "r"(half2));
  return v;
}
// Two floats to BF16, low half from `low`.
JMM_DEVICE uint32_t cvt_bf16x2(float low, float high) {
  uint32_t v;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(v) : "f"(high), "f"(low));
  return v;
}
JMM_DEVICE float ex2_approx_ftz(float x) {
  float v;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(v) : "f"(x));
  return v;
}
JMM_DEVICE float rcp_approx_ftz(float x) {
  float v;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(v) : "f"(x));
  return v;
}

// ---- clocks and places ----

JMM_DEVICE uint64_t globaltimer_ns() {
  uint64_t v;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(v));
  return v;
}
JMM_DEVICE uint32_t sm_id() {
  uint32_t v;
  asm volatile("mov.u32 %0, %%smid;" : "=r"(v));
  return v;
}

}  // namespace jax_megamoe::gpu
