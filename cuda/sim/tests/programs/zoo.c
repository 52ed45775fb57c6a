// Races that projects had, one function each, in a wrong form and in a right one. The first argument chooses the program, the
// second the form. Without one, the exit code is the number of programs.
#include "program.h"

// A batch goes in two chunks, each when it is filled, and one event stands for both: it is recorded after the first.
static void chunks(void) {
    CUstream copy = stream();
    CUevent copied = event();
    char *slot = pinned();
    CUdeviceptr to = device();
    enum { HALF = BYTES / 2 };
    for (int batch = 0; batch < BATCHES; batch++) {
        CK(cuEventSynchronize(copied));
        memset(slot, batch, HALF);
        CK(cuMemcpyHtoDAsync(to, slot, HALF, copy));
        if (!right) CK(cuEventRecord(copied, copy));
        memset(slot + HALF, batch, HALF);
        CK(cuMemcpyHtoDAsync(to + HALF, slot + HALF, HALF, copy));
        if (right) CK(cuEventRecord(copied, copy));
    }
}

// The default stream is taken to be ordered with every other. It is not with streams that are non-blocking.
static void default_stream(void) {
    CUstream work;
    CK(cuStreamCreate(&work, right ? 0 : CU_STREAM_NON_BLOCKING));
    char *slot = pinned();
    CUdeviceptr batch_at = device(), result = device();
    for (int batch = 0; batch < BATCHES; batch++) {
        memset(slot, batch, BYTES);
        upload(batch_at, slot, NULL);
        compute(result, batch_at, work);
        CK(cuStreamSynchronize(NULL));
    }
}

// The event is recorded before the work that it should stand for.
static void early_record(void) {
    CUstream copy = stream(), work = stream();
    CUevent copied = event(), used = event();
    char *slot = pinned();
    CUdeviceptr batch_at = device(), result = device();
    for (int batch = 0; batch < BATCHES; batch++) {
        CK(cuStreamSynchronize(copy));
        memset(slot, batch, BYTES);
        after(copy, used);
        if (!right) CK(cuEventRecord(copied, copy));
        upload(batch_at, slot, copy);
        if (right) CK(cuEventRecord(copied, copy));
        after(work, copied);
        compute(result, batch_at, work);
        CK(cuEventRecord(used, work));
    }
}

// A buffer is given back to the pool on the stream that allocated it, while another stream uses it: what PyTorch's
// `record_stream` is for.
static void free_on_other_stream(void) {
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
}

// Page-locked memory is freed while the copy may still read it.
static void freed_under_copy(void) {
    CUstream copy = stream();
    CUdeviceptr weights = device();
    for (int layer = 0; layer < BATCHES; layer++) {
        char *staging = pinned();
        memset(staging, layer, BYTES);
        upload(weights, staging, copy);
        if (right) CK(cuStreamSynchronize(copy));
        CK(cuMemFreeHost(staging));
    }
}

// The copy does not wait for one use of a device slot, that of an evaluation on a second stream: it overwrites what the
// kernel may still read.
static void no_last_use(void) {
    CUstream copy = stream(), train = stream(), evaluate = stream();
    CUevent copied = event(), trained = event(), evaluated = event();
    char *slots[2] = {pinned(), pinned()};
    CUdeviceptr batch_at = device(), result = device(), metric = device();
    for (int batch = 0; batch < BATCHES; batch++) {
        CK(cuStreamSynchronize(copy));
        memset(slots[batch % 2], batch, BYTES);
        after(copy, trained);
        if (right) after(copy, evaluated);
        upload(batch_at, slots[batch % 2], copy);
        CK(cuEventRecord(copied, copy));
        after(train, copied);
        after(evaluate, copied);
        compute(result, batch_at, train);
        CK(cuEventRecord(trained, train));
        compute(metric, batch_at, evaluate);
        CK(cuEventRecord(evaluated, evaluate));
    }
}

// The compute stream does not wait for the copy: it may compute with the batch before, or with half of each.
static void no_wait(void) {
    CUstream copy = stream(), work = stream();
    CUevent copied = event(), used = event();
    char *slot = pinned();
    CUdeviceptr batch_at = device(), result = device();
    for (int batch = 0; batch < BATCHES; batch++) {
        memset(slot, batch, BYTES);
        after(copy, used);
        upload(batch_at, slot, copy);
        CK(cuEventRecord(copied, copy));
        if (right) after(work, copied);
        compute(result, batch_at, work);
        CK(cuEventRecord(used, work));
        CK(cuEventSynchronize(copied));
    }
}

// Gradients go down on one stream, the optimizer runs on the host, parameters go up on another from the same buffer. The
// host waits, but for the wrong stream.
static void offload(void) {
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
}

// A copy of pageable memory is taken for one that is done when it returns. It is staged then, and may not have arrived.
static void pageable(void) {
    CUstream work = stream();
    char *weights = malloc(BYTES);
    CUdeviceptr weights_at = device(), result = device();
    for (int layer = 0; layer < BATCHES; layer++) {
        memset(weights, layer, BYTES);
        CK(cuMemcpyHtoD(weights_at, weights, BYTES));
        if (right) CK(cuStreamSynchronize(NULL));
        compute(result, weights_at, work);
        CK(cuStreamSynchronize(work));
    }
    free(weights);
}

// The result is read while its download runs: `tensor.to("cpu", non_blocking=True)`, and then its numbers.
static void read_early(void) {
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
}

// A slot is refilled before its copy is done: half of the next batch may arrive.
static void refill(void) {
    CUstream copy = stream();
    char *slots[2] = {pinned(), pinned()};
    CUevent copied[2] = {event(), event()};
    CUdeviceptr to = device();
    for (int batch = 0; batch < BATCHES; batch++) {
        int slot = batch % 2;
        if (right) CK(cuEventSynchronize(copied[slot]));
        memset(slots[slot], batch, BYTES);
        upload(to, slots[slot], copy);
        CK(cuEventRecord(copied[slot], copy));
    }
}

// Two slots and three events in rotation: a slot waits for the copy of three batches ago, and its last one was two ago.
static void rotation(void) {
    CUstream copy = stream();
    char *slots[2] = {pinned(), pinned()};
    CUevent copied[3] = {event(), event(), event()};
    CUdeviceptr to = device();
    int events = right ? 2 : 3;
    for (int batch = 0; batch < BATCHES; batch++) {
        CK(cuEventSynchronize(copied[batch % events]));
        memset(slots[batch % 2], batch, BYTES);
        upload(to, slots[batch % 2], copy);
        CK(cuEventRecord(copied[batch % events], copy));
    }
}

#define ROW(name) {#name, name}
static const struct { const char *name; void (*run)(void); } TABLE[] = {
    ROW(chunks), ROW(default_stream), ROW(early_record), ROW(free_on_other_stream), ROW(freed_under_copy),
    ROW(no_last_use), ROW(no_wait), ROW(offload), ROW(pageable), ROW(read_early), ROW(refill), ROW(rotation),
};

int main(int count, char **arguments) {
    const size_t programs = sizeof TABLE / sizeof *TABLE;
    if (count < 2) return programs;
    begin(count - 1, arguments + 1);
    for (size_t i = 0; i < programs; i++)
        if (!strcmp(arguments[1], TABLE[i].name)) TABLE[i].run();
    return end();
}
