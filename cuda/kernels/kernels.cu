// The kernels that the GPU report launches in place of training. `kernels.ptx` beside this file is their PTX:
//
//   pip install nvidia-cuda-nvcc==13.0.* nvidia-nvvm==13.0.* nvidia-cuda-crt==13.0.* nvidia-cuda-runtime==13.0.*
//   nvcc --ptx --gpu-architecture=compute_75 kernels.cu --output-file kernels.ptx
//
// The software driver recognizes both by name.

// Keeps one thread busy for at least this long, and uses no memory bandwidth.
extern "C" __global__ void twinbuf_spin(unsigned long long nanoseconds) {
  unsigned long long start, now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
  do {
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  } while (now - start < nanoseconds);
}

// Adds the bytes at `from` to `*sum`: one wrong byte changes it.
extern "C" __global__ void twinbuf_sum(const unsigned char *from, unsigned long long bytes, unsigned long long *sum) {
  unsigned long long own = 0;
  unsigned long long step = (unsigned long long)gridDim.x * blockDim.x;
  for (unsigned long long i = (unsigned long long)blockIdx.x * blockDim.x + threadIdx.x; i < bytes; i += step) {
    own += from[i];
  }
  atomicAdd(sum, own);
}
