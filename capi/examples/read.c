// Reads the batches of one of two ranks for three epochs, as a training would that was stopped and resumed once, and
// prints a checksum of all bytes: read FILE RANK
#include <stdio.h>
#include <stdlib.h>
#include <twinbuf.h>

// Ends the program with the text of the error if a call failed.
static int check(int code) {
    if (code < 0) {
        fprintf(stderr, "read: %s\n", twinbuf_last_error()->message);
        exit(1);
    }
    return code;
}

// The checksum of zlib.
static uint32_t adler32(uint32_t sum, const uint8_t *data, size_t len) {
    uint32_t low = sum & 0xffff, high = sum >> 16;
    for (size_t i = 0; i < len; i++) {
        low = (low + data[i]) % 65521;
        high = (high + low) % 65521;
    }
    return high << 16 | low;
}

static uint32_t sum = 1;
static uint64_t batches;

// Reads `most` batches, or up to the end.
static void train(twinbuf_loader *loader, uint64_t most) {
    twinbuf_batch batch = {.size = sizeof batch};
    for (uint64_t i = 0; i < most && check(twinbuf_next(loader, &batch, UINT64_MAX)) == TWINBUF_OK; i++) {
        sum = adler32(sum, batch.data, batch.len);
        batches++;
        check(twinbuf_release(&batch));
    }
}

int main(int argc, char **argv) {
    if (argc != 3) {
        fprintf(stderr, "read FILE RANK\n");
        return 2;
    }
    const char *paths[] = {argv[1]};
    twinbuf_files files = {.size = sizeof files, .paths = paths, .count = 1, .record_bytes = 64};
    twinbuf_records *records;
    check(twinbuf_open(&files, &records));
    twinbuf_options options = {.size = sizeof options, .batch = 4, .shuffle = 1, .seed = 42, .world = 2, .environment = 1};
    options.rank = strtoull(argv[2], NULL, 10);
    twinbuf_loader *loader;
    check(twinbuf_load(records, &options, &loader));
    check(twinbuf_epochs(loader, 0, 3));
    train(loader, 40000);

    // The checkpoint would go to a file, beside the model.
    char bytes[4096];
    twinbuf_text checkpoint = {.size = sizeof checkpoint, .bytes = bytes, .capacity = sizeof bytes};
    if (check(twinbuf_checkpoint(loader, &checkpoint)) == TWINBUF_SHORT) abort();
    check(twinbuf_close(loader, UINT64_MAX));
    check(twinbuf_free(loader));

    check(twinbuf_load(records, &options, &loader));
    check(twinbuf_resume(loader, &checkpoint, 3));
    train(loader, UINT64_MAX);
    printf("rank %s: %llu batches, adler32 %08x\n", argv[2], (unsigned long long)batches, sum);
    check(twinbuf_close(loader, UINT64_MAX));
    check(twinbuf_free(loader));
    check(twinbuf_free(records));
}
