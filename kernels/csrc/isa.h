// All kernels in the namespace TM_ISA, and their table. No standard library here: its inline functions would be
// compiled for this instruction set, and the linker might use them in other files.

namespace tokenmill {
namespace TM_ISA {

// clang-format off: each file uses those before
#include "simd.h"
#include "attention.h"
#include "items.h"
#include "store.h"
#include "ops.h"
#include "gemm.h"
// clang-format on

}  // namespace TM_ISA

const Kernels TM_KERNELS = {
    TM_ISA::attend,       TM_ISA::reduce,   TM_ISA::store_row, TM_ISA::write_row,
    TM_ISA::add_rms_norm, TM_ISA::silu_mul, TM_ISA::gelu_mul,  TM_ISA::softcap,   TM_ISA::argmax,
    TM_ISA::quantize,
#if TM_BF16
    TM_ISA::matmul,
#else
    nullptr,
#endif
};

}  // namespace tokenmill
