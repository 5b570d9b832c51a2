// Handles of slim.h that close themselves, and errors as exceptions.
#pragma once

#include <memory>
#include <slim.h>
#include <stdexcept>
#include <string>

extern char **environ;

namespace slim {

struct closer {
    void operator()(slim_endpoint *endpoint) const { slim_endpoint_close(endpoint); }
    void operator()(slim_flow *flow) const { slim_flow_close(flow); }
    // At an exception: the limit is short. Programs close a session by `close` below.
    void operator()(slim_session *session) const { slim_session_close(session, 1000); }
};

using endpoint = std::unique_ptr<slim_endpoint, closer>;
using flow = std::unique_ptr<slim_flow, closer>;
using session = std::unique_ptr<slim_session, closer>;

template <class Result>
Result check(Result code, const char *what)
{
    if (code < 0)
        throw std::runtime_error(std::string(what) + ": " + slim_strerror(int(code)) + " " + slim_error_detail());
    return code;
}

inline session open(const char *job)
{
    slim_options options = SLIM_OPTIONS_INIT;
    options.job = job;
    options.settings = environ;
    slim_session *opened;
    check(slim_session_open(&options, &opened), "open");
    return session(opened);
}

inline void close(session all, int timeout_ms)
{
    check(slim_session_close(all.release(), timeout_ms), "close");
}

template <class Address>
endpoint listen(const session &in, Address &at)
{
    slim_endpoint *opened;
    check(slim_listen(in.get(), reinterpret_cast<sockaddr *>(&at), sizeof at, &opened), "listen");
    socklen_t len = sizeof at;
    endpoint made(opened);
    check(slim_endpoint_address(opened, reinterpret_cast<sockaddr *>(&at), &len), "address");
    return made;
}

inline flow accept(const endpoint &at, int timeout_ms)
{
    slim_flow *opened;
    check(slim_accept(at.get(), timeout_ms, &opened), "accept");
    return flow(opened);
}

template <class Address>
flow connect(const session &in, const Address &to, int timeout_ms)
{
    slim_flow *opened;
    auto addr = reinterpret_cast<const sockaddr *>(&to);
    check(slim_connect(in.get(), addr, sizeof to, timeout_ms, &opened), "connect");
    return flow(opened);
}

inline slim_stats stats(const flow &of)
{
    slim_stats all;
    check(slim_flow_stats(of.get(), &all, sizeof all), "stats");
    return all;
}

} // namespace slim
