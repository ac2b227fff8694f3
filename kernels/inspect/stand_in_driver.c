/* A stand-in for libcuda.so.1: the functions that Triton's launch path calls. They execute no kernel.
 *
 * The functions count calls and check them. cuda.h contains the rules for tensor maps (TMA descriptors).
 * stand_in_configure sets the limits of launches. A call that breaks a rule returns an error code of the driver, and
 * stand_in_violation returns a description.
 */
#include "cuda.h"
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define DRIVER_VERSION 13000
#define MAX_THREADS 1024
#define SHARED_WITHOUT_OPT_IN (48 * 1024)
#define MAX_VIOLATIONS 64
#define TEXT 480

/* Read by name from Python. */
atomic_long stand_in_launches, stand_in_dependent, stand_in_descriptors, stand_in_modules, stand_in_violations;

static struct {
  int arch, multiprocessors, shared_per_block, shared_per_multiprocessor;
} device;

void stand_in_configure(int arch, int multiprocessors, int shared_per_block, int shared_per_multiprocessor) {
  device.arch = arch;
  device.multiprocessors = multiprocessors;
  device.shared_per_block = shared_per_block;
  device.shared_per_multiprocessor = shared_per_multiprocessor;
}

static char violations[MAX_VIOLATIONS][TEXT];
static _Thread_local char last_error[TEXT] = "rejected by the stand-in driver";

/* Returns the description of a violation; empty if there is none, or if index >= MAX_VIOLATIONS. */
const char *stand_in_violation(int index) { return index >= 0 && index < MAX_VIOLATIONS ? violations[index] : ""; }

static CUresult refuse(CUresult code, const char *text) {
  long index = atomic_fetch_add(&stand_in_violations, 1);
  snprintf(last_error, TEXT, "%s", text);
  if (index < MAX_VIOLATIONS)
    snprintf(violations[index], TEXT, "%s", text);
  return code;
}

void stand_in_reset(void) {
  stand_in_launches = stand_in_dependent = stand_in_descriptors = 0;
  stand_in_modules = stand_in_violations = 0;
  memset(violations, 0, sizeof violations);
}

/* Triton raises an exception with this text. */
CUresult cuGetErrorString(CUresult code, const char **text) {
  *text = last_error;
  return CUDA_SUCCESS;
}

/* ---- device and context: one device, always current ---- */

CUresult cuInit(unsigned flags) { return CUDA_SUCCESS; }
CUresult cuDriverGetVersion(int *version) { return *version = DRIVER_VERSION, CUDA_SUCCESS; }
CUresult cuDeviceGet(CUdevice *found, int ordinal) { return *found = ordinal, CUDA_SUCCESS; }
CUresult cuCtxGetCurrent(CUcontext *context) { return *context = (CUcontext)1, CUDA_SUCCESS; }
CUresult cuCtxSetCurrent(CUcontext context) { return CUDA_SUCCESS; }
CUresult cuCtxGetDevice(CUdevice *current) { return *current = 0, CUDA_SUCCESS; }
CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice of) { return *context = (CUcontext)1, CUDA_SUCCESS; }
CUresult cuCtxGetLimit(size_t *value, CUlimit limit) { return *value = 0, CUDA_SUCCESS; }
CUresult cuCtxSetLimit(CUlimit limit, size_t value) { return CUDA_SUCCESS; }

CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice of) {
  switch (attribute) {
  case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: *value = device.shared_per_block; break;
  case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR: *value = device.shared_per_multiprocessor; break;
  case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: *value = device.multiprocessors; break;
  case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: *value = device.arch / 10; break;
  case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: *value = device.arch % 10; break;
  case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK: *value = 65536; break;
  case CU_DEVICE_ATTRIBUTE_WARP_SIZE: *value = 32; break;
  default: *value = 0; /* clocks and bus width */
  }
  return CUDA_SUCCESS;
}

/* Returns every address as a device address, so that Triton accepts CPU tensors. */
CUresult cuPointerGetAttribute(void *data, CUpointer_attribute attribute, CUdeviceptr pointer) {
  *(CUdeviceptr *)data = pointer;
  return CUDA_SUCCESS;
}

/* ---- modules: each contains one function; they are never freed, so that launches after cuModuleUnload are found ---- */

typedef struct {
  char name[128];
  int dynamic_shared; /* limit in bytes */
  bool unloaded;
} Function;

CUresult cuModuleLoadData(CUmodule *module, const void *image) {
  if (memcmp(image, "\177ELF", 4) != 0)
    return refuse(CUDA_ERROR_INVALID_IMAGE, "module: not a cubin");
  Function *function = calloc(1, sizeof *function);
  if (function == NULL)
    return refuse(CUDA_ERROR_OUT_OF_MEMORY, "module: out of host memory");
  function->dynamic_shared = SHARED_WITHOUT_OPT_IN;
  *module = (CUmodule)function;
  stand_in_modules++;
  return CUDA_SUCCESS;
}

CUresult cuModuleUnload(CUmodule module) {
  ((Function *)module)->unloaded = true;
  return CUDA_SUCCESS;
}

CUresult cuModuleGetFunction(CUfunction *found, CUmodule module, const char *name) {
  Function *function = (Function *)module;
  snprintf(function->name, sizeof function->name, "%s", name);
  *found = (CUfunction)function;
  return CUDA_SUCCESS;
}

CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction handle) {
  /* registers and spills are 0 here; `vit-fast kernels` reads them from the machine code */
  *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? MAX_THREADS : 0;
  return CUDA_SUCCESS;
}

CUresult cuFuncSetCacheConfig(CUfunction handle, CUfunc_cache config) { return CUDA_SUCCESS; }

CUresult cuFuncSetAttribute(CUfunction handle, CUfunction_attribute attribute, int value) {
  Function *function = (Function *)handle;
  if (attribute >= CU_FUNC_ATTRIBUTE_MAX) /* Triton tries attributes of newer drivers first */
    return CUDA_ERROR_INVALID_VALUE;
  if (attribute != CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES)
    return CUDA_SUCCESS;
  if (value < 0 || value > device.shared_per_block) {
    char text[TEXT];
    snprintf(text, TEXT, "%s: %d bytes of shared memory requested, sm_%d has %d per block", function->name, value,
             device.arch, device.shared_per_block);
    return refuse(CUDA_ERROR_INVALID_VALUE, text);
  }
  function->dynamic_shared = value;
  return CUDA_SUCCESS;
}

CUresult cuOccupancyMaxActiveClusters(int *clusters, CUfunction handle, const CUlaunchConfig *config) {
  return *clusters = 1, CUDA_SUCCESS;
}

/* ---- launches ---- */

CUresult cuLaunchKernelEx(const CUlaunchConfig *c, CUfunction handle, void **parameters, void **extra) {
  const Function *function = (const Function *)handle;
  const char *problem = NULL;
  bool dependent = false;
  for (unsigned i = 0; i < c->numAttrs; i++)
    if (c->attrs[i].id == CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION)
      dependent = c->attrs[i].value.programmaticStreamSerializationAllowed;
  unsigned long threads = (unsigned long)c->blockDimX * c->blockDimY * c->blockDimZ;
  if (c->gridDimX < 1 || c->gridDimX > 2147483647u || c->gridDimY < 1 || c->gridDimY > 65535 || c->gridDimZ < 1 ||
      c->gridDimZ > 65535)
    problem = "the grid must be 1..2147483647 by 1..65535 by 1..65535";
  else if (threads < 1 || threads > MAX_THREADS || c->blockDimZ > 64)
    problem = "a block must have 1..1024 threads, at most 64 along z";
  else if (dependent && device.arch < 90)
    problem = "programmatic dependent launch needs sm_90 or newer";
  else if (c->sharedMemBytes > (unsigned)function->dynamic_shared)
    problem = "the shared memory exceeds the limit set for the function";
  else if (function->unloaded)
    problem = "the module is unloaded";
  if (problem != NULL) {
    char text[TEXT];
    snprintf(text, TEXT, "launch of %s: %s; grid %u, %u, %u, threads %lu, shared memory %u of %d bytes", function->name,
             problem, c->gridDimX, c->gridDimY, c->gridDimZ, threads, c->sharedMemBytes, function->dynamic_shared);
    return refuse(CUDA_ERROR_INVALID_VALUE, text);
  }
  stand_in_launches++;
  stand_in_dependent += dependent;
  return CUDA_SUCCESS;
}

/* ---- tensor maps ---- */

static unsigned element_bytes(CUtensorMapDataType type) {
  switch (type) {
  case CU_TENSOR_MAP_DATA_TYPE_UINT8: return 1;
  case CU_TENSOR_MAP_DATA_TYPE_UINT16:
  case CU_TENSOR_MAP_DATA_TYPE_FLOAT16:
  case CU_TENSOR_MAP_DATA_TYPE_BFLOAT16: return 2;
  case CU_TENSOR_MAP_DATA_TYPE_UINT32:
  case CU_TENSOR_MAP_DATA_TYPE_INT32:
  case CU_TENSOR_MAP_DATA_TYPE_FLOAT32:
  case CU_TENSOR_MAP_DATA_TYPE_FLOAT32_FTZ:
  case CU_TENSOR_MAP_DATA_TYPE_TFLOAT32:
  case CU_TENSOR_MAP_DATA_TYPE_TFLOAT32_FTZ: return 4;
  case CU_TENSOR_MAP_DATA_TYPE_UINT64:
  case CU_TENSOR_MAP_DATA_TYPE_INT64:
  case CU_TENSOR_MAP_DATA_TYPE_FLOAT64: return 8;
  default: return 0; /* rejects packed types, whose rules are not implemented */
  }
}

static unsigned swizzle_bytes(CUtensorMapSwizzle swizzle) {
  return swizzle == CU_TENSOR_MAP_SWIZZLE_32B ? 32 : swizzle == CU_TENSOR_MAP_SWIZZLE_64B ? 64 : 128;
}

/* Returns the first rule that a map breaks, or NULL. No rule compares two strides: in [B, H, N, D] views of packed
 * qkv, the inner dimension N has a larger stride than H. */
static const char *broken_rule(const CUtensorMap *map, unsigned size, unsigned rank, const void *address,
                               const cuuint64_t *dims, const cuuint64_t *strides, const cuuint32_t *box,
                               const cuuint32_t *steps, CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle) {
  if (device.arch < 90)
    return "tensor maps need sm_90 or newer";
  if ((size_t)map % 64 != 0)
    return "the map must be aligned to 64 bytes";
  if (size == 0)
    return "the data type must be unpacked";
  if (interleave != CU_TENSOR_MAP_INTERLEAVE_NONE)
    return "the layout must not be interleaved";
  if (rank < 1 || rank > 5)
    return "the rank must be 1..5";
  if ((size_t)address == 0 || (size_t)address % 16 != 0)
    return "the address must be aligned to 16 bytes";
  for (unsigned i = 0; i < rank; i++) {
    if (dims[i] < 1 || dims[i] > 1ull << 32)
      return "a dimension must be 1..2^32";
    if (box[i] < 1 || box[i] > 256)
      return "a side of the box must be 1..256";
    if (steps[i] < 1 || steps[i] > 8)
      return "an element stride must be 1..8";
  }
  for (unsigned i = 0; i + 1 < rank; i++)
    if (strides[i] == 0 || strides[i] % 16 != 0 || strides[i] >= 1ull << 40)
      return "a stride must be a multiple of 16 bytes, above 0 and below 2^40";
  if (box[0] * size % 16 != 0)
    return "the inner side of the box must be a multiple of 16 bytes";
  if (swizzle != CU_TENSOR_MAP_SWIZZLE_NONE && box[0] * size > swizzle_bytes(swizzle))
    return "the inner side of the box must not exceed the swizzle";
  return NULL;
}

CUresult cuTensorMapEncodeTiled(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *address,
                                const cuuint64_t *dims, const cuuint64_t *strides, const cuuint32_t *box,
                                const cuuint32_t *steps, CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                                CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill) {
  const unsigned size = element_bytes(type);
  const char *rule = broken_rule(map, size, rank, address, dims, strides, box, steps, interleave, swizzle);
  stand_in_descriptors++;
  memset(map, 0, sizeof *map);
  if (rule == NULL) { /* store the arguments in the 16 words of the map, where tests/emulator reads them */
    map->opaque[0] = (cuuint64_t)address;
    map->opaque[1] = (cuuint64_t)type << 32 | rank << 16 | swizzle << 8 | fill;
    for (unsigned i = 0; i < rank; i++)
      map->opaque[2 + 2 * i] = dims[i] << 16 | box[i], map->opaque[3 + 2 * i] = i + 1 < rank ? strides[i] : 0;
    return CUDA_SUCCESS;
  }
  char text[TEXT];
  int used = snprintf(text, TEXT, "tensor map: %s; address %p, %u bytes per element, swizzle %d", rule, address, size,
                      (int)swizzle);
  for (unsigned i = 0; i < rank && i < 5; i++) {
    used += snprintf(text + used, TEXT - used, "; dim %llu box %u", (unsigned long long)dims[i], box[i]);
    if (i + 1 < rank)
      used += snprintf(text + used, TEXT - used, " stride %llu", (unsigned long long)strides[i]);
  }
  return refuse(CUDA_ERROR_INVALID_VALUE, text);
}
