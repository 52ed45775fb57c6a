// ns a batch: next FILE
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <twinbuf.h>

static void check(int failed) {
    if (failed) {
        fprintf(stderr, "next: %s\n", twinbuf_last_error()->message);
        exit(1);
    }
}

int main(int argc, char **argv) {
    const char *paths[] = {argv[1]};
    twinbuf_files files = {.size = sizeof files, .paths = paths, .count = argc - 1, .record_bytes = 8192};
    twinbuf_records *records;
    twinbuf_loader *loader;
    check(twinbuf_open(&files, &records));
    check(twinbuf_load(records, &(twinbuf_options){.size = sizeof(twinbuf_options), .batch = 1, .read_mode = TWINBUF_READ_PREAD}, &loader));
    // The first epoch warms the page cache.
    for (uint64_t epoch = 0; epoch < 2; epoch++) {
        struct timespec start, end;
        uint64_t epochs = epoch ? 16 : 1, batches = 0, sum = 0;
        check(twinbuf_epochs(loader, epoch, epoch + epochs));
        clock_gettime(CLOCK_MONOTONIC, &start);
        twinbuf_batch batch = {.size = sizeof batch};
        int code;
        while ((code = twinbuf_next(loader, &batch, UINT64_MAX)) == TWINBUF_OK) {
            sum += batch.data[0];
            batches++;
            check(twinbuf_release(&batch));
        }
        check(code < 0 || sum);
        clock_gettime(CLOCK_MONOTONIC, &end);
        double ns = (end.tv_sec - start.tv_sec) * 1e9 + (end.tv_nsec - start.tv_nsec);
        if (epoch) printf("%.1f\n", ns / batches);
    }
    check(twinbuf_close(loader, UINT64_MAX));
    check(twinbuf_free(loader));
    check(twinbuf_free(records));
}
