// wgmma with A in registers. Include hopper.cuh first.

#pragma once
// The same with A in registers, u32 a[4] of each lane, in 16 bits; B is K-major.
#define REGISTERS_32 "{%16, %17, %18, %19}, %20"
#define REGISTERS_48 "{%24, %25, %26, %27}, %28"
#define REGISTERS_64 "{%32, %33, %34, %35}, %36"
#define REGISTERS_96 "{%48, %49, %50, %51}, %52"
#define REGISTERS_128 "{%64, %65, %66, %67}, %68"
#define WGMMA_A_(N, a, b)                                                                         \
  asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" SUM_##N "}, " \
               REGISTERS_##N ", 1, 1, 1, 0;"                                                              \
               : D_##N : "r"((a)[0]), "r"((a)[1]), "r"((a)[2]), "r"((a)[3]), "l"(b))
#define WGMMA_A(N, a, b) WGMMA_A_(N, a, b)
