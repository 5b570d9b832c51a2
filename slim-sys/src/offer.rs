//! What the preload library's copy of this crate offers to the [other copies](crate::copies) in the process.

use libc::{c_int, c_void};

use crate::copies::{How, OfferedCalls, Work};
use crate::{fds, inside, numbers};

static OFFERED: OfferedCalls = OfferedCalls {
    size: size_of::<OfferedCalls>(),
    run: {
        extern "C" fn run(how: u32, work: Work, argument: *mut c_void) {
            let run = || work(argument);
            match how {
                how if how == How::Whole as u32 => numbers::whole(run),
                how if how == How::Apart as u32 => numbers::apart(run),
                _ => inside::as_agent(run),
            }
        }
        run
    },
    register: {
        extern "C" fn register(fd: c_int, on: bool) {
            if on {
                fds::claim(fd);
            } else {
                fds::release(fd);
            }
        }
        register
    },
    is_registered: {
        extern "C" fn is_registered(fd: c_int) -> bool {
            fds::is_internal(fd)
        }
        is_registered
    },
    agent: {
        extern "C" fn agent(begins: bool) {
            if begins {
                numbers::begin();
            } else {
                numbers::end();
            }
        }
        agent
    },
};

/// What this copy offers to others.
pub fn offered() -> &'static OfferedCalls {
    &OFFERED
}
