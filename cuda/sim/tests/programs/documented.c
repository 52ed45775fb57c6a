// What NVIDIA documents, one function each: races that a device may show or not, and refusals. `programs.rs` has the
// sentences. The first argument chooses; a refusal's code, and that of the capture's end, are printed.
#include "program.h"
#include <sys/wait.h>
#include <unistd.h>

static CUstream one, two;
static CUdeviceptr memory;
static char *slot;
static CUevent mark;

static void pageable_copy_then_another_stream(void) {
    char source[256] = {0};
    CK(cuMemcpyHtoD(memory, source, sizeof source));
    CK(cuMemsetD8Async(memory, 1, sizeof source, one));
}
static void download_read_before_a_wait(void) {
    download(slot, memory, one);
    if (*(volatile char *)slot) putchar('.');
}
static void source_written_under_its_copy_and_back(void) {
    memset(slot, 1, BYTES);
    upload(memory, slot, one);
    slot[BYTES / 2] = 2;
    slot[BYTES / 2] = 1;
}
static void non_blocking_stream_beside_the_default_one(void) {
    CK(cuMemsetD8Async(memory, 1, BYTES, NULL));
    CK(cuMemsetD8Async(memory, 2, BYTES, one));
}
static void wait_for_an_event_before_its_record(void) {
    after(two, mark);
    CK(cuMemsetD8Async(memory, 1, BYTES, one));
    CK(cuEventRecord(mark, one));
    CK(cuMemsetD8Async(memory, 2, BYTES, two));
}
static void record_after_the_wait(void) {
    CK(cuEventRecord(mark, one));
    after(two, mark);
    CK(cuMemsetD8Async(memory, 1, BYTES, one));
    CK(cuEventRecord(mark, one));
    CK(cuMemsetD8Async(memory, 2, BYTES, two));
}
static void use_after_a_free_in_stream_order(void) {
    CUdeviceptr pooled;
    CK(cuMemAllocAsync(&pooled, BYTES, one));
    CK(cuEventRecord(mark, one));
    after(two, mark);
    CK(cuMemsetD8Async(pooled, 1, BYTES, two));
    CK(cuMemFreeAsync(pooled, one));
}
static void wait_for_another_context(void) {
    CUcontext other;
    upload(memory, slot, one);
    CK(cuCtxCreate(&other, 0, 0));
    CK(cuCtxSynchronize());
    slot[0] = 1;
    CK(cuCtxDestroy(other));
    CK(cuCtxSetCurrent(context));
}
static int synchronous_copy(void) { return cuMemcpyHtoD(memory, slot, BYTES); }
static int module_load(void) {
    CUmodule module;
    return cuModuleLoadData(&module, ".version 7.0\n.target sm_50\n.address_size 64\n");
}
static int pageable_download(void) {
    char target[256];
    return cuMemcpyDtoHAsync(target, memory, sizeof target, two);
}
static int event_of_another_context(void) {
    CUcontext other;
    CK(cuCtxCreate(&other, 0, 0));
    int refused = cuEventRecord(event(), one);
    CK(cuCtxDestroy(other));
    CK(cuCtxSetCurrent(context));
    return refused;
}
static int call_in_a_forked_child(void) {
    int ended;
    pid_t child = fork();
    if (!child) _exit(cuCtxSynchronize());
    waitpid(child, &ended, 0);
    return WEXITSTATUS(ended);
}
static int captured_event(void) {
    CK(cuEventRecord(mark, one));
    return cuEventQuery(mark);
}

#define RACE(name) {#name, name, NULL}
#define REFUSAL(name) {#name, NULL, name}
static const struct { const char *name; void (*race)(void); int (*refused)(void); } TABLE[] = {
    RACE(pageable_copy_then_another_stream), RACE(download_read_before_a_wait),
    RACE(source_written_under_its_copy_and_back), RACE(non_blocking_stream_beside_the_default_one),
    RACE(wait_for_an_event_before_its_record), RACE(record_after_the_wait), RACE(use_after_a_free_in_stream_order),
    RACE(wait_for_another_context),
    REFUSAL(synchronous_copy), REFUSAL(module_load), REFUSAL(pageable_download), REFUSAL(captured_event),
    REFUSAL(event_of_another_context), REFUSAL(call_in_a_forked_child),
};

int main(int count, char **arguments) {
    begin(count, arguments);
    one = stream(), two = stream(), memory = device(), slot = pinned(), mark = event();
    for (size_t i = 0; i < sizeof TABLE / sizeof *TABLE; i++) {
        if (count < 2 || strcmp(arguments[1], TABLE[i].name)) continue;
        if (TABLE[i].race) {
            TABLE[i].race();
        } else {
            CUgraph graph;
            CK(cuStreamBeginCapture(one, CU_STREAM_CAPTURE_MODE_GLOBAL));
            int refused = TABLE[i].refused();
            printf("%d %d\n", refused, cuStreamEndCapture(one, &graph));
        }
        return end();
    }
    fprintf(stderr, "wanted one of the names in the table\n");
    return 2;
}
