// The kernels for one instruction set, independent of the compiler flags. The build to run is chosen at run time.
#include "native.h"

#if defined(__x86_64__)
#include <immintrin.h>

// Applies to the end of the file, where templates are instantiated.
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#else
#pragma GCC target("avx2,fma")
#endif

#define TM_ISA avx2
#define TM_KERNELS avx2_kernels
#define TM_AVX512 0
#define TM_BF16 0
#include "isa.h"

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
