// The result is read while its download runs: `tensor.to("cpu", non_blocking=True)`, and then its numbers.
#include "../program.h"

int main(int count, char **arguments) {
    begin(count, arguments);
    CUstream work = stream();
    CUevent arrived = event();
    CUdeviceptr loss_at = device();
    char *loss = pinned();
    long sum = 0;
    for (int step = 0; step < BATCHES; step++) {
        CK(cuMemsetD8Async(loss_at, step, BYTES, work));
        download(loss, loss_at, work);
        CK(cuEventRecord(arrived, work));
        if (right) CK(cuEventSynchronize(arrived));
        sum += loss[BYTES - 1];
        CK(cuEventSynchronize(arrived));
    }
    printf("%ld\n", sum);
    return end();
}
