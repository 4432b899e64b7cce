// Stands in for the header of this name in CUDA's compiler, which the packages of its runtime alone do not bring along.
// To a plain C++ compiler, what marks functions and types for the device says nothing.

#pragma once

#define CUDARTAPI
#define CUDARTAPI_CDECL
#define CUDARTAPI_WEAK
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __builtin_align__(bytes) __align__(bytes)
#define __constant__
#define __cudart_builtin__
#define __device__
#define __device_builtin__
#define __device_builtin_surface_type__
#define __device_builtin_texture_type__
#define __forceinline__ inline __attribute__((always_inline))
#define __global__
#define __host__
#define __managed__
#define __shared__
