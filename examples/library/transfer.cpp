// Sends a file, in C++. usage: see transfer.c
// The sender reads the file into buffers of its own and posts them; a completed post gives its buffer back.
#include "slim.hpp"

#include <arpa/inet.h>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iostream>
#include <netinet/in.h>
#include <vector>

constexpr int limit_ms = 60000;
constexpr size_t piece = 1 << 20;
constexpr size_t ahead = 16; // buffers

// Length and checksum, as in transfer.c.
struct summary {
    uint64_t length = 0, sum = 0;

    void add(const char *data, size_t len)
    {
        for (size_t i = 0; i < len; i += 8) {
            uint64_t word = 0;
            std::memcpy(&word, data + i, len - i < 8 ? len - i : 8);
            sum = (sum ^ word) * 0x100000001b3;
            sum ^= sum >> 29;
        }
        length += len;
    }
};

using buffer = std::vector<char>;

static void send_file(const slim::session &session, const slim::flow &flow, std::vector<buffer> &buffers, const char *path)
{
    std::ifstream file(path, std::ios::binary);
    if (!file)
        throw std::runtime_error(std::string(path) + ": cannot be read");
    std::vector<buffer *> unused;
    for (buffer &b : buffers)
        unused.push_back(&b);
    summary mine;
    bool more = true;
    while (more || unused.size() < ahead) {
        if (more && !unused.empty()) {
            buffer *b = unused.back();
            size_t len = size_t(file.read(b->data(), piece).gcount());
            more = len == piece;
            mine.add(b->data(), len);
            slim::check(slim_flow_post(flow.get(), b->data(), len, b), "post");
            unused.pop_back();
        }
        slim_update updates[32];
        int wait = more && !unused.empty() ? 0 : limit_ms;
        int n = slim::check(slim_session_wait(session.get(), updates, 32, wait), "wait");
        if (n == 0 && wait > 0)
            throw std::runtime_error("stuck");
        for (int i = 0; i < n; i++)
            if (updates[i].what == SLIM_UPDATE_POST) {
                slim::check(updates[i].status, "completion");
                unused.push_back(static_cast<buffer *>(updates[i].post));
            }
    }
    slim::check(slim_flow_finish(flow.get()), "finish");
    summary theirs;
    slim::check(slim_flow_recv_all(flow.get(), &theirs, sizeof theirs, limit_ms, nullptr), "receive");
    if (theirs.length != mine.length || theirs.sum != mine.sum)
        throw std::runtime_error("the receiver has other bytes");
    std::cout << mine.length << " bytes\n";
}

static void receive_file(const slim::flow &flow, const char *path)
{
    std::ofstream file(path, std::ios::binary);
    buffer buf(piece);
    summary all;
    size_t n = piece;
    while (n == piece) {
        int code = slim_flow_recv_all(flow.get(), buf.data(), piece, limit_ms, &n);
        if (code != SLIM_ERR_ENDED)
            slim::check(code, "receive");
        all.add(buf.data(), n);
        file.write(buf.data(), std::streamsize(n));
    }
    file.close();
    if (!file)
        throw std::runtime_error(std::string(path) + ": cannot be written");
    slim::check(slim_flow_send_all(flow.get(), &all, sizeof all, limit_ms, nullptr), "answer");
}

int main(int argc, char **argv)
try {
    bool sends = argc == 5 && std::string(argv[1]) == "send";
    sockaddr_in addr{};
    addr.sin_family = AF_INET;
    if (argc != 5 || (!sends && std::string(argv[1]) != "receive") || inet_pton(AF_INET, argv[2], &addr.sin_addr) != 1) {
        std::cerr << "usage: " << argv[0] << " send|receive ADDRESS PORT FILE\n";
        return 2;
    }
    addr.sin_port = htons(uint16_t(std::atoi(argv[3])));

    // Outlives the session: at an exception the session is closed first, and uses posted buffers until then.
    std::vector<buffer> buffers(sends ? ahead : 0, buffer(piece));
    slim::session session = slim::open("transfer");
    slim::flow flow;
    if (sends) {
        flow = slim::connect(session, addr, limit_ms);
        send_file(session, flow, buffers, argv[4]);
    } else {
        slim::endpoint endpoint = slim::listen(session, addr);
        std::cout << ntohs(addr.sin_port) << std::endl;
        flow = slim::accept(endpoint, limit_ms);
        endpoint.reset();
        receive_file(flow, argv[4]);
    }
    std::cerr << "resumes: " << slim::stats(flow).resumes << "\n";
    flow.reset();
    slim::close(std::move(session), limit_ms);
    return 0;
} catch (const std::exception &e) {
    std::cerr << e.what() << "\n";
    return 1;
}
