/* The few words of the device compiler that the runtime's headers use, as a plain C compiler sees
 * them: torch's wheels bring those headers along, but not this one. */
#ifndef SIMULATED_HOST_DEFINES_H
#define SIMULATED_HOST_DEFINES_H

#define __host__
#define __device__
#define __global__
#define __constant__
#define __cudart_builtin__
#define __device_builtin__
#define __device_builtin_texture_type__
#define __device_builtin_surface_type__
#define CUDARTAPI
#define CUDARTAPI_CDECL
#define __align__(n) __attribute__((aligned(n)))
#define __builtin_align__(n) __attribute__((aligned(n)))

#endif
