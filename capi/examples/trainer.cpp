// The trainer of trainer.zig in C++: the batches of one of two ranks for three epochs, resumed once: trainer FILE RANK
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <twinbuf.hpp>

constexpr std::size_t numbers = 16;  // fifteen inputs and a target

struct Model {
    float weights[numbers - 1] = {}, bias = 0, loss = 1;  // the loss is a moving average

    void step(float *batch, std::size_t len) {
        for (std::size_t i = 0; i < len; i++) batch[i] = (batch[i] - 0.5f) * 3.4641016f;
        for (const float *record = batch; record < batch + len; record += numbers) {
            float output = bias;
            for (std::size_t i = 0; i + 1 < numbers; i++) output += weights[i] * record[i];
            const float error = output - record[numbers - 1];
            for (std::size_t i = 0; i + 1 < numbers; i++) weights[i] -= 0.001f * error * record[i];
            bias -= 0.001f * error;
            loss += 0.001f * (error * error - loss);
        }
    }
};

int main(int argc, char **argv) try {
    if (argc != 3) return std::fputs("trainer FILE RANK\n", stderr), 2;
    auto files = twinbuf::make<twinbuf_files>();
    files.record_bytes = numbers * sizeof(float);
    const twinbuf::Records records({argv[1]}, files);
    auto options = twinbuf::make<twinbuf_options>();
    options.batch = 4;
    options.shuffle = 1;
    options.seed = 42;
    options.rank = std::stoull(argv[2]);
    options.world = 2;
    Model model;
    std::string checkpoint;
    std::uint64_t batches = 0;
    std::uint32_t low = 1, high = 0;  // the checksum of zlib
    for (std::uint64_t most : {UINT64_C(40000), UINT64_MAX}) {
        twinbuf::Loader loader(records, options);
        if (checkpoint.empty()) loader.epochs(0, 3);
        else loader.resume(checkpoint, 3);
        for (auto &batch : loader) {
            for (std::uint8_t byte : batch) {
                low = (low + byte) % 65521;
                high = (high + low) % 65521;
            }
            model.step(reinterpret_cast<float *>(batch.data()), batch.size() / sizeof(float));
            batches++;
            if (--most == 0) break;
        }
        checkpoint = loader.checkpoint();
        loader.close();
    }
    std::uint32_t bits;
    std::memcpy(&bits, &model.loss, sizeof bits);
    std::printf("rank %s: %llu batches, adler32 %08x\n", argv[2], (unsigned long long)batches, high << 16 | low);
    std::printf("loss %08x = %.6f\n", bits, model.loss);
} catch (const twinbuf::Error &error) {
    return std::fprintf(stderr, "trainer: %s\n", error.what()), 1;
}
