// Many flows with poll(2) in C++. usage: see many.c
#include "slim.hpp"

#include <arpa/inet.h>
#include <cstdlib>
#include <iostream>
#include <netinet/in.h>
#include <poll.h>
#include <vector>

constexpr int limit_ms = 60000;

using count = unsigned long long;

// One flow, with its number in the order of the client, which is the first byte of each stream.
class stream {
public:
    stream(slim::flow flow, int number, count total) : flow_(std::move(flow)), number_(number), total_(total)
    {
        slim::check(slim_flow_set_context(flow_.get(), this), "context");
    }
    stream(const stream &) = delete;

    bool done() const { return ended_ && finished_; }

    void send_more()
    {
        unsigned char buf[16384];
        while (number_ >= 0 && sent_ < total_) {
            size_t len = size_t(std::min<count>(total_ - sent_, sizeof buf));
            for (size_t i = 0; i < len; i++)
                buf[i] = pattern(sent_ + i);
            ssize_t n = slim_flow_send(flow_.get(), buf, len, 0);
            if (n == SLIM_ERR_AGAIN)
                return;
            sent_ += count(slim::check(n, "send"));
        }
        if (sent_ == total_ && !finished_) {
            slim::check(slim_flow_finish(flow_.get()), "finish");
            finished_ = true;
        }
    }

    void receive_more()
    {
        unsigned char buf[16384];
        while (!ended_) {
            ssize_t n = slim_flow_recv(flow_.get(), buf, sizeof buf, 0);
            if (n == SLIM_ERR_AGAIN)
                return;
            slim::check(n, "receive");
            if (n == 0 && received_ != total_)
                throw std::runtime_error("a flow ended at " + std::to_string(received_));
            ended_ = n == 0;
            if (n > 0 && number_ < 0)
                number_ = buf[0];
            for (ssize_t i = 0; i < n; i++, received_++)
                if (buf[i] != pattern(received_))
                    throw std::runtime_error("wrong byte at " + std::to_string(received_));
        }
    }

private:
    unsigned char pattern(count at) const
    {
        return static_cast<unsigned char>(at == 0 ? unsigned(number_) : (at * 31 + unsigned(number_)) >> 3);
    }

    slim::flow flow_;
    int number_; // -1: not known yet
    count total_, sent_ = 0, received_ = 0;
    bool finished_ = false, ended_ = false;
};

int main(int argc, char **argv)
try {
    bool serves = argc == 6 && std::string(argv[1]) == "serve";
    sockaddr_in addr{};
    addr.sin_family = AF_INET;
    if ((argc != 5 && !serves) || inet_pton(AF_INET, argv[1 + serves], &addr.sin_addr) != 1) {
        std::cerr << "usage: " << argv[0] << " [serve] ADDRESS PORT FLOWS BYTES\n";
        return 2;
    }
    addr.sin_port = htons(uint16_t(std::atoi(argv[2 + serves])));
    size_t flows = std::strtoul(argv[3 + serves], nullptr, 10);
    count total = std::strtoull(argv[4 + serves], nullptr, 10);

    slim::session session = slim::open("many");
    slim::endpoint endpoint;
    std::vector<std::unique_ptr<stream>> all;
    if (serves) {
        endpoint = slim::listen(session, addr);
        std::cout << ntohs(addr.sin_port) << std::endl;
    }
    while (!serves && all.size() < flows)
        all.emplace_back(new stream(slim::connect(session, addr, 0), int(all.size()), total));

    pollfd ready{slim::check(slim_session_descriptor(session.get()), "descriptor"), POLLIN, 0};
    size_t done = 0;
    while (done < flows) {
        slim_update updates[64];
        int n = slim::check(slim_session_progress(session.get(), updates, 64), "progress");
        for (int i = 0; i < n; i++) {
            slim_flow *flow;
            while (updates[i].what & SLIM_UPDATE_ACCEPTABLE && all.size() < flows && slim_accept(endpoint.get(), 0, &flow) == 0)
                all.emplace_back(new stream(slim::flow(flow), -1, total));
            auto s = static_cast<stream *>(updates[i].context);
            if (!s || s->done())
                continue;
            s->receive_more();
            s->send_more();
            done += s->done();
        }
        if (n == 0 && poll(&ready, 1, limit_ms) == 0)
            throw std::runtime_error("stuck");
    }
    slim_stats stats;
    slim::check(slim_session_stats(session.get(), &stats, sizeof stats), "stats");
    std::cerr << "resumes: " << stats.resumes << "\n";
    all.clear();
    slim::close(std::move(session), limit_ms);
    return 0;
} catch (const std::exception &e) {
    std::cerr << e.what() << "\n";
    return 1;
}
