// A buffer is given back to the pool on the stream that allocated it, while another stream uses it: what PyTorch's
// `record_stream` is for.
#include "../program.h"

int main(int count, char **arguments) {
    begin(count, arguments);
    CUstream copy = stream(), work = stream();
    CUevent copied = event(), used = event();
    char *slot = pinned();
    CUdeviceptr result = device();
    for (int batch = 0; batch < BATCHES; batch++) {
        CUdeviceptr batch_at;
        CK(cuMemAllocAsync(&batch_at, BYTES, copy));
        CK(cuEventSynchronize(copied));
        memset(slot, batch, BYTES);
        upload(batch_at, slot, copy);
        CK(cuEventRecord(copied, copy));
        after(work, copied);
        compute(result, batch_at, work);
        CK(cuEventRecord(used, work));
        if (right) after(copy, used);
        CK(cuMemFreeAsync(batch_at, copy));
    }
    return end();
}
