// Echo in C++. usage: see echo.c
#include "slim.hpp"

#include <arpa/inet.h>
#include <cstdlib>
#include <iostream>
#include <netinet/in.h>
#include <string>

constexpr int limit_ms = 60000;

// Sends back what comes. Returns whether the client said goodbye.
static bool answer(const slim::flow &flow)
{
    char buf[4096];
    std::string last;
    while (ssize_t n = slim::check(slim_flow_recv(flow.get(), buf, sizeof buf, limit_ms), "receive")) {
        slim::check(slim_flow_send_all(flow.get(), buf, size_t(n), limit_ms, nullptr), "send");
        last.append(buf, size_t(n));
        last.erase(0, last.size() < 4 ? 0 : last.size() - 4);
    }
    return last == "bye\n";
}

static void ask(const slim::flow &flow)
{
    for (std::string line; std::getline(std::cin, line);) {
        line += '\n';
        slim::check(slim_flow_send_all(flow.get(), line.data(), line.size(), limit_ms, nullptr), "send");
        slim::check(slim_flow_recv_all(flow.get(), &line[0], line.size(), limit_ms, nullptr), "receive");
        std::cout << line << std::flush;
    }
    slim::check(slim_flow_finish(flow.get()), "finish");
    char end;
    slim::check(slim_flow_recv(flow.get(), &end, 1, limit_ms), "end");
    std::cerr << "resumes: " << slim::stats(flow).resumes << "\n";
}

int main(int argc, char **argv)
try {
    bool serves = argc == 4 && std::string(argv[1]) == "serve";
    sockaddr_in addr{};
    addr.sin_family = AF_INET;
    if ((argc != 3 && !serves) || inet_pton(AF_INET, argv[argc - 2], &addr.sin_addr) != 1) {
        std::cerr << "usage: " << argv[0] << " [serve] ADDRESS PORT\n";
        return 2;
    }
    addr.sin_port = htons(uint16_t(std::atoi(argv[argc - 1])));

    slim::session session = slim::open("echo");
    if (serves) {
        slim::endpoint endpoint = slim::listen(session, addr);
        std::cout << ntohs(addr.sin_port) << std::endl;
        while (!answer(slim::accept(endpoint, limit_ms))) {
        }
    } else {
        ask(slim::connect(session, addr, limit_ms));
    }
    slim::close(std::move(session), limit_ms);
    return 0;
} catch (const std::exception &e) {
    std::cerr << e.what() << "\n";
    return 1;
}
