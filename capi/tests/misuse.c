// Misuse and faults: each is an error code with a text, and nothing crashes or leaks: misuse FOLDER
#define _GNU_SOURCE
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <twinbuf.h>
#include <unistd.h>

// Reads of the library come here first. That of the first batch waits while `stuck` is set.
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static int stuck, waiting;

ssize_t pread64(int file, void *out, size_t bytes, off64_t offset) {
    pthread_mutex_lock(&lock);
    if (offset == 0 && bytes == 128 && stuck) {
        waiting++;
        pthread_cond_broadcast(&changed);
        while (stuck) pthread_cond_wait(&changed, &lock);
        waiting--;
        pthread_cond_broadcast(&changed);
    }
    pthread_mutex_unlock(&lock);
    return syscall(SYS_pread64, file, out, bytes, offset);
}

static void set_stuck(int value) {
    pthread_mutex_lock(&lock);
    stuck = value;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
}

static void wait_for(int readers) {
    pthread_mutex_lock(&lock);
    while (waiting != readers) pthread_cond_wait(&changed, &lock);
    pthread_mutex_unlock(&lock);
}

#define REQUIRE(condition)                                                                \
    if (!(condition)) {                                                                   \
        const twinbuf_error *error = twinbuf_last_error();                                \
        fprintf(stderr, "misuse.c:%d: %s; the last error: %s\n", __LINE__, #condition,    \
                error ? error->message : "none");                                         \
        abort();                                                                          \
    }

// Whether a call failed with this code, and a text that contains `part`.
static int fails(int code, int wanted, const char *part) {
    const twinbuf_error *error = twinbuf_last_error();
    return code == wanted && error && error->code == wanted && strstr(error->message, part);
}
static int cases;
#define FAILS(call, wanted, part)              \
    do {                                       \
        REQUIRE(fails(call, wanted, part));    \
        cases++;                               \
    } while (0)
#define OK(call) REQUIRE((call) == TWINBUF_OK)

static char path[4096];

static void make_file(const char *folder, const char *name, size_t bytes) {
    snprintf(path, sizeof path, "%s/%s", folder, name);
    FILE *file = fopen(path, "wb");
    REQUIRE(file);
    for (size_t i = 0; i < bytes; i++) fputc((int)(i / 64), file);
    REQUIRE(fclose(file) == 0);
}

static int open_files(const char *name, uint32_t format, twinbuf_records **out) {
    return twinbuf_open(&(twinbuf_files){.size = sizeof(twinbuf_files), .paths = &name, .count = 1, .format = format, .record_bytes = 64}, out);
}

static twinbuf_loader *open_loader(uint64_t held_ms) {
    twinbuf_records *records;
    OK(open_files(path, TWINBUF_FORMAT_RAW, &records));
    twinbuf_options options = {.size = sizeof options, .batch = 2, .depth = 2, .read_mode = TWINBUF_READ_PREAD, .held_timeout_ms = held_ms};
    twinbuf_loader *loader;
    OK(twinbuf_load(records, &options, &loader));
    REQUIRE(twinbuf_count(records) == 10 && twinbuf_steps(loader, 0) == 5);
    OK(twinbuf_free(records));
    return loader;
}

static void wrong_arguments(void) {
    twinbuf_records *records;
    twinbuf_loader *loader;
    twinbuf_batch batch = {.size = sizeof batch};
    twinbuf_text text = {.size = sizeof text};
    const char *paths[] = {path, NULL};
    twinbuf_options options = {.size = sizeof options, .batch = 2};
    REQUIRE(twinbuf_last_error() == NULL);
    FAILS(twinbuf_open(NULL, &records), TWINBUF_ERROR_NULL, "files");
    FAILS(twinbuf_open(&(twinbuf_files){.size = sizeof(twinbuf_files), .count = 1}, &records), TWINBUF_ERROR_NULL, "paths");
    // No files at all, as an empty vector gives them.
    FAILS(twinbuf_open(&(twinbuf_files){.size = sizeof(twinbuf_files), .record_bytes = 64}, &records), TWINBUF_ERROR_FILE, "no files");
    FAILS(twinbuf_open(&(twinbuf_files){.size = sizeof(twinbuf_files), .format = TWINBUF_FORMAT_NPY}, &records), TWINBUF_ERROR_FILE, "no files");
    FAILS(twinbuf_open(&(twinbuf_files){.size = sizeof(twinbuf_files), .paths = paths, .count = 2}, &records), TWINBUF_ERROR_NULL, "path");
    FAILS(twinbuf_open(&(twinbuf_files){.size = sizeof(twinbuf_files), .paths = paths}, &records), TWINBUF_ERROR_OPTION,
          "`record_bytes`: wanted at least 1, found 0");
    FAILS(open_files(path, TWINBUF_FORMAT_RAW, NULL), TWINBUF_ERROR_NULL, "out");
    FAILS(open_files(path, 9, &records), TWINBUF_ERROR_OPTION, "`format`: wanted 0 to 2, found 9");
    FAILS(twinbuf_count(NULL), TWINBUF_ERROR_NULL, "records");
    FAILS(twinbuf_load(NULL, &options, &loader), TWINBUF_ERROR_NULL, "records");
    OK(open_files(path, TWINBUF_FORMAT_RAW, &records));
    FAILS(twinbuf_load(records, NULL, &loader), TWINBUF_ERROR_NULL, "options");
    FAILS(twinbuf_load(records, &options, NULL), TWINBUF_ERROR_NULL, "out");
    FAILS(twinbuf_load(records, &(twinbuf_options){.size = sizeof(twinbuf_options)}, &loader), TWINBUF_ERROR_OPTION, "batch");
    FAILS(twinbuf_load(records, &(twinbuf_options){.size = sizeof(twinbuf_options), .batch = 2, .read_mode = 9}, &loader), TWINBUF_ERROR_OPTION,
          "read_mode");
    options.rank = 1;
    FAILS(twinbuf_load(records, &options, &loader), TWINBUF_ERROR_OPTION, "rank");
    options.rank = 0;
    const uint64_t ranges[][2] = {{0, 11}, {9, 2}, {10, 1}, {11, 0}, {UINT64_MAX, UINT64_MAX}};
    for (int i = 0; i < 5; i++) {
        options.first = ranges[i][0];
        options.records = ranges[i][1];
        FAILS(twinbuf_load(records, &options, &loader), TWINBUF_ERROR_OPTION, i < 2 ? "record" : "`first`: wanted less than the 10 records");
    }
    // A handle of another kind, and none at all.
    FAILS(twinbuf_epochs((twinbuf_loader *)records, 0, 1), TWINBUF_ERROR_HANDLE, "a loader");
    FAILS(twinbuf_free(&options), TWINBUF_ERROR_HANDLE, "records or a loader");
    // Nor are a lone high bit and an address of large pages NULL.
    for (size_t bit = 21; bit < 8 * sizeof(void *); bit++) FAILS(twinbuf_free((void *)((uintptr_t)1 << bit)), TWINBUF_ERROR_HANDLE, "records or a loader");
    batch.id = (size_t)records;
    FAILS(twinbuf_release(&batch), TWINBUF_ERROR_HANDLE, "a batch");
    FAILS(twinbuf_keep(&batch), TWINBUF_ERROR_HANDLE, "a batch");
    REQUIRE(twinbuf_count(records) == 10);
    FAILS(twinbuf_steps(NULL, 0), TWINBUF_ERROR_NULL, "a loader");
    FAILS(twinbuf_epochs(NULL, 0, 1), TWINBUF_ERROR_NULL, "a loader");
    FAILS(twinbuf_resume(NULL, &text, 1), TWINBUF_ERROR_NULL, "a loader");
    FAILS(twinbuf_checkpoint(NULL, &text), TWINBUF_ERROR_NULL, "a loader");
    FAILS(twinbuf_report(NULL, false, &text), TWINBUF_ERROR_NULL, "a loader");
    FAILS(twinbuf_next(NULL, &batch, 0), TWINBUF_ERROR_NULL, "a loader");
    FAILS(twinbuf_close(NULL, 0), TWINBUF_ERROR_NULL, "a loader");
    FAILS(twinbuf_keep(NULL), TWINBUF_ERROR_NULL, "batch");
    FAILS(twinbuf_release(NULL), TWINBUF_ERROR_NULL, "batch");
    FAILS(twinbuf_release(&(twinbuf_batch){.size = sizeof(twinbuf_batch)}), TWINBUF_ERROR_NULL, "batch");
    OK(twinbuf_free(NULL));
    OK(twinbuf_free(records));
    FAILS(twinbuf_free(records), TWINBUF_ERROR_HANDLE, "freed");
    FAILS(twinbuf_count(records), TWINBUF_ERROR_HANDLE, "freed");
    // A loader without epochs.
    loader = open_loader(0);
    FAILS(twinbuf_next(loader, &batch, UINT64_MAX), TWINBUF_ERROR_EPOCHS, "no epochs");
    FAILS(twinbuf_next(loader, NULL, 0), TWINBUF_ERROR_NULL, "batch");
    FAILS(twinbuf_resume(loader, NULL, 1), TWINBUF_ERROR_NULL, "from");
    FAILS(twinbuf_resume(loader, &text, 1), TWINBUF_ERROR_NULL, "from");
    FAILS(twinbuf_resume(loader, &(twinbuf_text){.size = sizeof(twinbuf_text), .bytes = "{}", .len = 2}, 1), TWINBUF_ERROR_CHECKPOINT, "not a");
    FAILS(twinbuf_resume(loader, &(twinbuf_text){.size = sizeof(twinbuf_text), .bytes = "{}", .len = SIZE_MAX}, 1), TWINBUF_ERROR_OPTION, "from.len");
    FAILS(twinbuf_checkpoint(loader, NULL), TWINBUF_ERROR_NULL, "text");
    text.capacity = 4096;
    FAILS(twinbuf_checkpoint(loader, &text), TWINBUF_ERROR_NULL, "text");
    OK(twinbuf_free(loader));
}

// The call fails with each size that is less than that of the struct, or more by a part of a field. `all` is the struct.
#define EACH_WRONG_SIZE(type, call, part)                       \
    for (all.size = 0; all.size < sizeof(type) + 8; all.size++) \
        if (all.size != sizeof(type)) FAILS(call, TWINBUF_ERROR_SIZE, part)

// The sizes of structs: those of older and newer programs, and wrong ones.
static void wrong_sizes(void) {
    twinbuf_records *records;
    twinbuf_loader *loader;
    // A struct of a later version, with a field that this one does not have.
    struct {
        union {
            size_t size;
            twinbuf_files files;
            twinbuf_options options;
            twinbuf_batch batch;
            twinbuf_text text;
            twinbuf_description description;
        };
        uint64_t later[4];
    } all = {0};
    const char *paths[] = {path};
    const twinbuf_files files = {.paths = paths, .count = 1, .record_bytes = 64};
    const twinbuf_options options = {.batch = 2, .read_mode = TWINBUF_READ_PREAD};
    twinbuf_files given = files;
    OK(open_files(path, TWINBUF_FORMAT_RAW, &records));
    const size_t sizes[] = {0, 1, 8, 16, 4097, SIZE_MAX / 2, SIZE_MAX};
    for (int i = 0; i < 7; i++) {
        all.files = files;
        all.size = sizes[i];
        FAILS(twinbuf_open(&all.files, &records), TWINBUF_ERROR_SIZE, "files");
        all.options = options;
        all.size = sizes[i];
        FAILS(twinbuf_load(records, &all.options, &loader), TWINBUF_ERROR_SIZE, "options");
        FAILS(twinbuf_describe(records, &all.description), TWINBUF_ERROR_SIZE, "out");
        loader = open_loader(0);
        OK(twinbuf_epochs(loader, 0, 1));
        FAILS(twinbuf_next(loader, &all.batch, UINT64_MAX), TWINBUF_ERROR_SIZE, "batch");
        FAILS(twinbuf_checkpoint(loader, &all.text), TWINBUF_ERROR_SIZE, "text");
        FAILS(twinbuf_report(loader, 0, &all.text), TWINBUF_ERROR_SIZE, "text");
        FAILS(twinbuf_resume(loader, &all.text, 1), TWINBUF_ERROR_SIZE, "from");
        FAILS(twinbuf_release(&all.batch), TWINBUF_ERROR_SIZE, "batch");
        FAILS(twinbuf_keep(&all.batch), TWINBUF_ERROR_SIZE, "batch");
        OK(twinbuf_free(loader));
    }
    // A size that cuts a field.
    all.files = files;
    EACH_WRONG_SIZE(twinbuf_files, twinbuf_open(&all.files, &records), "files");
    all.options = options;
    EACH_WRONG_SIZE(twinbuf_options, twinbuf_load(records, &all.options, &loader), "options");
    EACH_WRONG_SIZE(twinbuf_description, twinbuf_describe(records, &all.description), "out");
    loader = open_loader(0);
    OK(twinbuf_epochs(loader, 0, 1));
    EACH_WRONG_SIZE(twinbuf_batch, twinbuf_next(loader, &all.batch, UINT64_MAX), "batch");
    EACH_WRONG_SIZE(twinbuf_text, twinbuf_checkpoint(loader, &all.text), "text");
    OK(twinbuf_free(loader));
    // A newer program that leaves the later field at 0 runs; one that sets it is refused.
    given.size = sizeof given;
    unsigned char newer[sizeof given + 8] = {0};
    memcpy(newer, &given, sizeof given);
    *(size_t *)newer = sizeof newer;
    twinbuf_records *second;
    OK(twinbuf_open((twinbuf_files *)newer, &second));
    OK(twinbuf_free(second));
    for (size_t i = sizeof given; i < sizeof newer; i++) {
        newer[i] = 1;
        FAILS(twinbuf_open((twinbuf_files *)newer, &second), TWINBUF_ERROR_SIZE, "later version");
        newer[i] = 0;
    }
    // Its results end with 0, and nothing is written behind them.
    unsigned char out[sizeof(twinbuf_description) + 16];
    memset(out, 0xee, sizeof out);
    *(size_t *)out = sizeof out - 8;
    OK(twinbuf_describe(records, (twinbuf_description *)out));
    for (size_t i = sizeof(twinbuf_description); i < sizeof out; i++)
        REQUIRE(out[i] == (i < sizeof out - 8 ? 0 : 0xee));
    twinbuf_description found = {.size = sizeof found};
    OK(twinbuf_describe(records, &found));
    REQUIRE(found.size == sizeof found && found.count == 10 && found.record_bytes == 64 && found.header == 0);
    REQUIRE(strcmp(found.dtype, "bytes") == 0 && found.dimensions == 1 && found.shape[0] == 64);
    FAILS(twinbuf_describe(NULL, &found), TWINBUF_ERROR_NULL, "records");
    FAILS(twinbuf_describe(records, NULL), TWINBUF_ERROR_NULL, "out");
    OK(twinbuf_free(records));
    FAILS(twinbuf_describe(records, &found), TWINBUF_ERROR_HANDLE, "freed");
    REQUIRE(twinbuf_version() == TWINBUF_VERSION && TWINBUF_VERSION == 1000);
    REQUIRE(twinbuf_last_error()->size == sizeof(twinbuf_error));
}

static void wrong_options(void) {
    twinbuf_records *records;
    twinbuf_loader *loader;
    OK(open_files(path, TWINBUF_FORMAT_RAW, &records));
    const size_t depths[] = {1, (size_t)1 << 31, (size_t)1 << 40, (size_t)1 << 62, SIZE_MAX};
    for (int i = 0; i < 5; i++) {
        twinbuf_options options = {.size = sizeof options, .batch = 2, .depth = depths[i]};
        FAILS(twinbuf_load(records, &options, &loader), TWINBUF_ERROR_OPTION, i ? "bytes" : "depth");
        options.depth = 0;
        options.environment = 1;
        char text[32];
        snprintf(text, sizeof text, "%zu", depths[i]);
        setenv("TWINBUF_DEPTH", text, 1);
        FAILS(twinbuf_load(records, &options, &loader), TWINBUF_ERROR_OPTION, i ? "bytes" : "depth");
        unsetenv("TWINBUF_DEPTH");
    }
    twinbuf_options options = {.size = sizeof options, .batch = 2, .workers = 65};
    FAILS(twinbuf_load(records, &options, &loader), TWINBUF_ERROR_OPTION, "workers");
    options = (twinbuf_options){.size = sizeof options, .batch = 2, .last_batch = 3};
    FAILS(twinbuf_load(records, &options, &loader), TWINBUF_ERROR_OPTION, "last_batch");
    options = (twinbuf_options){.size = sizeof options, .batch = 2, .window = 4, .chunk = 2};
    FAILS(twinbuf_load(records, &options, &loader), TWINBUF_ERROR_OPTION, "window");
    options = (twinbuf_options){.size = sizeof options, .batch = 2, .shuffle = 1, .chunk = 2};
    FAILS(twinbuf_load(records, &options, &loader), TWINBUF_ERROR_OPTION, "chunk");
    twinbuf_files bytes_in_sequence = {.size = sizeof bytes_in_sequence, .paths = (const char *[]){path}, .count = 1};
    bytes_in_sequence.record_bytes = 64, bytes_in_sequence.sequence = 4;
    twinbuf_records *refused;
    FAILS(twinbuf_open(&bytes_in_sequence, &refused), TWINBUF_ERROR_OPTION, "sequence");
    // The last batch of 10 records in steps of 4: omitted, smaller, or filled up.
    for (uint32_t last = TWINBUF_LAST_DROP; last <= TWINBUF_LAST_WRAP; last++) {
        options = (twinbuf_options){.size = sizeof options, .batch = 4, .last_batch = last};
        OK(twinbuf_load(records, &options, &loader));
        OK(twinbuf_epochs(loader, 0, 1));
        twinbuf_batch batch = {.size = sizeof batch};
        uint64_t all = 0;
        while (twinbuf_next(loader, &batch, UINT64_MAX) == TWINBUF_OK) {
            all += batch.records;
            OK(twinbuf_release(&batch));
        }
        REQUIRE(all == 8 + 2 * last);
        OK(twinbuf_free(loader));
    }
    OK(twinbuf_free(records));
    // The checkpoint of another plan ends the epochs before it, and the error stays until new ones begin.
    char bytes[4096];
    twinbuf_text text = {.size = sizeof text, .bytes = bytes, .capacity = sizeof bytes};
    loader = open_loader(0);
    OK(twinbuf_epochs(loader, 0, 1));
    OK(twinbuf_checkpoint(loader, &text));
    char *step = strstr(bytes, "\"step\":0");
    REQUIRE(step);
    step[strlen("\"step\":")] = '9';
    FAILS(twinbuf_resume(loader, &text, 1), TWINBUF_ERROR_CHECKPOINT, "step");
    twinbuf_batch batch = {.size = sizeof batch};
    for (int i = 0; i < 3; i++)
        FAILS(twinbuf_next(loader, &batch, i ? UINT64_MAX : 0), TWINBUF_ERROR_CHECKPOINT, "step");
    OK(twinbuf_epochs(loader, 4, 5));
    OK(twinbuf_next(loader, &batch, UINT64_MAX));
    REQUIRE(batch.epoch == 4 && batch.step == 0);
    OK(twinbuf_release(&batch));
    // No epochs leave the position where it is, as in Rust and Python.
    OK(twinbuf_checkpoint(loader, &text));
    OK(twinbuf_epochs(loader, 5, 5));
    REQUIRE(twinbuf_next(loader, &batch, UINT64_MAX) == TWINBUF_END);
    char same[4096];
    OK(twinbuf_checkpoint(loader, &(twinbuf_text){.size = sizeof text, .bytes = same, .capacity = sizeof same}));
    REQUIRE(strstr(bytes, "\"epoch\":4,\"step\":1") && strcmp(bytes, same) == 0);
    OK(twinbuf_free(loader));
}

// A loop over all batches that meets HELD before batch `at` of two epochs, once or more, and sees each batch once.
static void held_goes_on(void) {
    for (int at = 0; at <= 8; at++) {
        twinbuf_loader *loader = open_loader(1);
        twinbuf_batch batch = {.size = sizeof batch}, kept[2] = {batch, batch};
        OK(twinbuf_epochs(loader, 0, 2));
        for (int count = 0; count < 10; count++) {
            if (count == at) {
                for (int i = 0; i < 2; i++, count++) {
                    OK(twinbuf_next(loader, &kept[i], UINT64_MAX));
                    REQUIRE(kept[i].epoch * 5 + kept[i].step == (uint64_t)count);
                }
                if (count < 10)
                    for (int i = 0; i < 3; i++)
                        FAILS(twinbuf_next(loader, &batch, i == 1 ? 30 : UINT64_MAX), TWINBUF_ERROR_HELD, "slot");
                for (int i = 0; i < 2; i++) OK(twinbuf_release(&kept[i]));
                if (count == 10) break;
            }
            OK(twinbuf_next(loader, &batch, UINT64_MAX));
            REQUIRE(batch.epoch * 5 + batch.step == (uint64_t)count && batch.data[0] == 2 * batch.step);
            OK(twinbuf_release(&batch));
        }
        REQUIRE(twinbuf_next(loader, &batch, UINT64_MAX) == TWINBUF_END);
        REQUIRE(twinbuf_next(loader, &batch, 0) == TWINBUF_END);
        char bytes[4096];
        OK(twinbuf_report(loader, false, &(twinbuf_text){.size = sizeof(twinbuf_text), .bytes = bytes, .capacity = sizeof bytes}));
        REQUIRE(strstr(bytes, "2 epochs, 10 batches") == bytes);
        OK(twinbuf_close(loader, UINT64_MAX));
        OK(twinbuf_free(loader));
    }
}

static void *release(void *batch) {
    return (void *)(intptr_t)twinbuf_release(batch);
}

static void after_the_end(void) {
    twinbuf_loader *loader = open_loader(1);
    twinbuf_batch first = {.size = sizeof first}, second = first, copy = first;
    OK(twinbuf_epochs(loader, 0, 1));
    OK(twinbuf_next(loader, &first, UINT64_MAX));
    OK(twinbuf_next(loader, &second, UINT64_MAX));
    FAILS(twinbuf_next(loader, &copy, UINT64_MAX), TWINBUF_ERROR_HELD, "slot");
    FAILS(twinbuf_next(loader, &copy, UINT64_MAX), TWINBUF_ERROR_HELD, "slot");
    // Of two threads that release a batch, one gets an error.
    copy = second;
    pthread_t thread;
    REQUIRE(pthread_create(&thread, NULL, release, &copy) == 0);
    int here = twinbuf_release(&second);
    void *there;
    REQUIRE(pthread_join(thread, &there) == 0);
    REQUIRE(here + (int)(intptr_t)there == TWINBUF_ERROR_HANDLE);
    FAILS(twinbuf_release(&second), TWINBUF_ERROR_HANDLE, "released");
    FAILS(twinbuf_keep(&second), TWINBUF_ERROR_HANDLE, "released");
    // A batch that is kept leaves its slot.
    OK(twinbuf_keep(&first));
    OK(twinbuf_keep(&first));
    OK(twinbuf_epochs(loader, 3, 4));
    int batches = 0;
    for (; twinbuf_next(loader, &second, UINT64_MAX) == TWINBUF_OK; batches++) {
        REQUIRE(second.epoch == 3 && second.step == (uint64_t)batches && second.records == 2 && second.len == 128);
        REQUIRE(second.data[64] == 2 * batches + 1);
        OK(twinbuf_release(&second));
    }
    REQUIRE(batches == 5);
    // A text in two calls.
    twinbuf_text text = {.size = sizeof text};
    for (int json = 0; json < 2; json++) {
        text.capacity = 0;
        REQUIRE(twinbuf_report(loader, json, &text) == TWINBUF_SHORT && text.len > 0);
        text.capacity = text.len;
        text.bytes = malloc(text.len + 1);
        REQUIRE(twinbuf_report(loader, json, &text) == TWINBUF_SHORT);
        text.capacity++;
        OK(twinbuf_report(loader, json, &text));
        REQUIRE(strlen(text.bytes) == text.len && (text.bytes[0] == '{') == json);
        free(text.bytes);
    }
    OK(twinbuf_close(loader, 10000));
    FAILS(twinbuf_close(loader, 10000), TWINBUF_ERROR_CLOSED, "closed");
    FAILS(twinbuf_next(loader, &second, 0), TWINBUF_ERROR_CLOSED, "closed");
    FAILS(twinbuf_epochs(loader, 0, 1), TWINBUF_ERROR_CLOSED, "closed");
    char *start = "{\"version\":4,\"epoch\":0,\"step\":0,\"before\":[],\"plan\":null,\"record_bytes\":null,\"fingerprint\":null}";
    text = (twinbuf_text){.size = sizeof text, .bytes = start, .len = strlen(start)};
    FAILS(twinbuf_resume(loader, &text, 1), TWINBUF_ERROR_CLOSED, "closed");
    FAILS(twinbuf_checkpoint(loader, &text), TWINBUF_ERROR_CLOSED, "closed");
    FAILS(twinbuf_report(loader, false, &text), TWINBUF_ERROR_CLOSED, "closed");
    REQUIRE(twinbuf_steps(loader, 0) == 5);
    OK(twinbuf_free(loader));
    FAILS(twinbuf_free(loader), TWINBUF_ERROR_HANDLE, "freed");
    FAILS(twinbuf_next(loader, &second, 0), TWINBUF_ERROR_HANDLE, "freed");
    FAILS(twinbuf_steps(loader, 0), TWINBUF_ERROR_HANDLE, "freed");
    REQUIRE(first.data[0] == 0 && first.data[127] == 1);
    OK(twinbuf_release(&first));
    FAILS(twinbuf_release(&first), TWINBUF_ERROR_HANDLE, "released");
}

static void *next(void *loader) {
    twinbuf_batch batch = {.size = sizeof batch};
    int code;
    // Again while the other thread is inside.
    while ((code = twinbuf_next(loader, &batch, UINT64_MAX)) == TWINBUF_ERROR_BUSY) sched_yield();
    return (void *)(intptr_t)(code == TWINBUF_OK ? twinbuf_release(&batch) : code);
}

// The other thread waits in `twinbuf_next` for a read that does not return, or will call it when that has returned.
static void two_threads(void) {
    twinbuf_loader *loader = open_loader(0);
    set_stuck(1);
    OK(twinbuf_epochs(loader, 0, 1));
    wait_for(1);
    pthread_t thread;
    REQUIRE(pthread_create(&thread, NULL, next, loader) == 0);
    int code;
    twinbuf_text text = {.size = sizeof text};
    while ((code = twinbuf_checkpoint(loader, &text)) == TWINBUF_SHORT) sched_yield();
    FAILS(code, TWINBUF_ERROR_BUSY, "another thread");
    twinbuf_batch batch = {.size = sizeof batch};
    FAILS(twinbuf_next(loader, &batch, UINT64_MAX), TWINBUF_ERROR_BUSY, "another thread");
    FAILS(twinbuf_close(loader, 0), TWINBUF_ERROR_BUSY, "another thread");
    // The thread inside keeps the loader.
    OK(twinbuf_free(loader));
    set_stuck(0);
    void *found;
    REQUIRE(pthread_join(thread, &found) == 0 && (int)(intptr_t)found == TWINBUF_OK);
}

// Another thread waits for a read that does not return. A cancel ends its wait, and no batch is lost.
static void cancelled(void) {
    twinbuf_loader *loader = open_loader(0);
    FAILS(twinbuf_cancel(NULL), TWINBUF_ERROR_NULL, "a loader");
    set_stuck(1);
    OK(twinbuf_epochs(loader, 0, 1));
    wait_for(1);
    pthread_t thread;
    REQUIRE(pthread_create(&thread, NULL, next, loader) == 0);
    OK(twinbuf_cancel(loader));
    void *found;
    REQUIRE(pthread_join(thread, &found) == 0 && (int)(intptr_t)found == TWINBUF_ERROR_CANCELLED);
    // Before a call: it ends that one, and only that one.
    OK(twinbuf_cancel(loader));
    OK(twinbuf_cancel(loader));
    twinbuf_batch batch = {.size = sizeof batch};
    FAILS(twinbuf_next(loader, &batch, UINT64_MAX), TWINBUF_ERROR_CANCELLED, "cancel");
    REQUIRE(twinbuf_next(loader, &batch, 1) == TWINBUF_PENDING);
    set_stuck(0);
    for (uint64_t step = 0; step < 5; step++) {
        OK(twinbuf_next(loader, &batch, UINT64_MAX));
        REQUIRE(batch.step == step);
        OK(twinbuf_release(&batch));
    }
    REQUIRE(twinbuf_next(loader, &batch, UINT64_MAX) == TWINBUF_END);
    OK(twinbuf_close(loader, UINT64_MAX));
    OK(twinbuf_cancel(loader));
    OK(twinbuf_free(loader));
    FAILS(twinbuf_cancel(loader), TWINBUF_ERROR_HANDLE, "freed");
}

// A child of fork() reads with a loader of its own. It cannot use its parent's, and frees it.
static void forked(void) {
    twinbuf_loader *loader = open_loader(0);
    OK(twinbuf_epochs(loader, 0, 1));
    twinbuf_batch batch = {.size = sizeof batch}, held[2] = {batch, batch};
    // All slots: the reading thread waits during the fork, and holds no lock of the allocator.
    for (int i = 0; i < 2; i++) OK(twinbuf_next(loader, &held[i], UINT64_MAX));
    pid_t child = fork();
    REQUIRE(child >= 0);
    uint64_t next = 2;
    if (child == 0) {
        FAILS(twinbuf_next(loader, &batch, UINT64_MAX), TWINBUF_ERROR_OTHER, "forked");
        for (int i = 0; i < 2; i++) OK(twinbuf_release(&held[i]));
        OK(twinbuf_close(loader, UINT64_MAX));
        OK(twinbuf_free(loader));
        loader = open_loader(0);
        OK(twinbuf_epochs(loader, 0, 1));
        next = 0;
    } else {
        int status;
        REQUIRE(waitpid(child, &status, 0) == child && status == 0);
        for (int i = 0; i < 2; i++) OK(twinbuf_release(&held[i]));
    }
    for (; next < 5; next++) {
        OK(twinbuf_next(loader, &batch, UINT64_MAX));
        REQUIRE(batch.step == next && batch.data[0] == 2 * next);
        OK(twinbuf_release(&batch));
    }
    REQUIRE(twinbuf_next(loader, &batch, UINT64_MAX) == TWINBUF_END);
    OK(twinbuf_close(loader, UINT64_MAX));
    OK(twinbuf_free(loader));
    if (child == 0) _exit(0);
}

static void stuck_read(void) {
    twinbuf_loader *loader = open_loader(0);
    set_stuck(1);
    OK(twinbuf_epochs(loader, 0, 1));
    wait_for(1);
    twinbuf_batch batch = {.size = sizeof batch};
    REQUIRE(twinbuf_next(loader, &batch, 1) == TWINBUF_PENDING);
    FAILS(twinbuf_close(loader, 1), TWINBUF_ERROR_TIMEOUT, "wanted an end within 0.001 s");
    REQUIRE(strcmp(twinbuf_last_error()->path, path) == 0 && twinbuf_last_error()->offset == 0);
    REQUIRE(strchr(twinbuf_last_error()->message, '\n') == NULL);
    OK(twinbuf_free(loader));
    set_stuck(0);
    wait_for(0);
}

static void faults_of_files(const char *folder) {
    twinbuf_records *records;
    char fifo[4200];
    snprintf(fifo, sizeof fifo, "%s/fifo", folder);
    REQUIRE(mkfifo(fifo, 0600) == 0);
    FAILS(open_files(fifo, TWINBUF_FORMAT_RAW, &records), TWINBUF_ERROR_FILE, "FIFO");
    REQUIRE(unlink(fifo) == 0);
    FAILS(open_files(fifo, TWINBUF_FORMAT_RAW, &records), TWINBUF_ERROR_FILE, "no such file");
    REQUIRE(strcmp(twinbuf_last_error()->path, fifo) == 0 && twinbuf_last_error()->offset == -1);
    FAILS(open_files(path, TWINBUF_FORMAT_NPY, &records), TWINBUF_ERROR_FILE, "byte 0");
    REQUIRE(twinbuf_last_error()->offset == 0);
    FAILS(open_files(path, TWINBUF_FORMAT_LLM_C, &records), TWINBUF_ERROR_FILE, "header");
    // Truncated at each place while it is open: all whole batches, then the error, until new epochs begin.
    for (int whole = 4; whole >= 0; whole--) {
        make_file(folder, "records.bin", 640);
        twinbuf_loader *loader = open_loader(0);
        REQUIRE(truncate(path, 128 * whole + 44) == 0);
        for (int again = 0; again < 2; again++) {
            OK(twinbuf_epochs(loader, 0, 2));
            twinbuf_batch batch = {.size = sizeof batch};
            int code, batches = 0;
            while ((code = twinbuf_next(loader, &batch, UINT64_MAX)) == TWINBUF_OK) {
                OK(twinbuf_release(&batch));
                batches++;
            }
            REQUIRE(batches == whole);
            for (int i = 0; i < 3; i++) {
                FAILS(code, TWINBUF_ERROR_READ, "truncated");
                REQUIRE(strcmp(twinbuf_last_error()->path, path) == 0);
                REQUIRE(twinbuf_last_error()->offset == 128 * whole + 44);
                code = twinbuf_next(loader, &batch, i ? UINT64_MAX : 0);
            }
        }
        OK(twinbuf_close(loader, UINT64_MAX));
        OK(twinbuf_free(loader));
    }
}

// Paths with a newline, of a trace and of a read that does not return: the message has one line, and the path is as it was.
static void strange_paths(const char *folder) {
    make_file(folder, "two\nlines.bin", 640);
    twinbuf_records *records;
    twinbuf_loader *loader;
    char trace[4200];
    snprintf(trace, sizeof trace, "%s/no\nfolder/trace.json", folder);
    setenv("TWINBUF_TRACE", trace, 1);
    OK(open_files(path, TWINBUF_FORMAT_RAW, &records));
    twinbuf_options options = {.size = sizeof options, .batch = 2, .environment = 1};
    FAILS(twinbuf_load(records, &options, &loader), TWINBUF_ERROR_FILE, "the trace could not be written: ");
    unsetenv("TWINBUF_TRACE");
    REQUIRE(twinbuf_last_error()->path && strcmp(twinbuf_last_error()->path, trace) == 0 && twinbuf_last_error()->offset == -1);
    REQUIRE(strchr(twinbuf_last_error()->message, '\n') == NULL);
    OK(twinbuf_free(records));
    stuck_read();
    FAILS(open_files("two\nlines", TWINBUF_FORMAT_RAW, &records), TWINBUF_ERROR_FILE, "two\\nlines");
}

// Removed, or closed, before each batch in turn: all batches of a file that is open, and the error of a closed loader.
static void ended_before_each_batch(const char *folder) {
    for (int at = 0; at <= 10; at++) {
        for (int closed = 0; closed < 2; closed++) {
            make_file(folder, "records.bin", 640);
            twinbuf_loader *loader = open_loader(0);
            OK(twinbuf_epochs(loader, 0, 2));
            twinbuf_batch batch = {.size = sizeof batch};
            int code = TWINBUF_OK, batches = 0;
            for (;; batches++) {
                if (batches == at) OK(closed ? twinbuf_close(loader, UINT64_MAX) : -unlink(path));
                code = twinbuf_next(loader, &batch, UINT64_MAX);
                if (code != TWINBUF_OK) break;
                REQUIRE(batch.data[0] == 2 * (batches % 5) && batch.data[64] == 2 * (batches % 5) + 1);
                OK(twinbuf_release(&batch));
            }
            REQUIRE(batches == (closed ? at : 10));
            for (int i = 0; i < 2; i++) {
                if (closed) FAILS(code, TWINBUF_ERROR_CLOSED, "closed");
                else REQUIRE(code == TWINBUF_END);
                code = twinbuf_next(loader, &batch, i ? UINT64_MAX : 0);
            }
            OK(twinbuf_free(loader));
        }
    }
}

int main(int argc, char **argv) {
    REQUIRE(argc == 2);
    make_file(argv[1], "records.bin", 640);
    wrong_arguments();
    wrong_sizes();
    wrong_options();
    held_goes_on();
    after_the_end();
    two_threads();
    cancelled();
    forked();
    stuck_read();
    faults_of_files(argv[1]);
    ended_before_each_batch(argv[1]);
    strange_paths(argv[1]);
    printf("misuse: %d calls, each an error with a text\n", cases);
}
