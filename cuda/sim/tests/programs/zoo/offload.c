// Gradients go down on one stream, the optimizer runs on the host, parameters go up on another from the same buffer. The
// host waits, but for the wrong stream.
#include "../program.h"

int main(int count, char **arguments) {
    begin(count, arguments);
    CUstream down = stream(), up = stream();
    CUevent updated = event();
    CUdeviceptr gradients = device(), parameters = device();
    char *buffer = pinned();
    for (int step = 0; step < BATCHES; step++) {
        CK(cuMemsetD8Async(gradients, step, BYTES, down));
        after(down, updated);
        download(buffer, gradients, down);
        CK(cuStreamSynchronize(right ? down : up));
        for (int i = 0; i < BYTES; i++) buffer[i] -= 1;
        upload(parameters, buffer, up);
        CK(cuEventRecord(updated, up));
    }
    return end();
}
