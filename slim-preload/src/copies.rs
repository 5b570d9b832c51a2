//! What the library offers to a program that links SLIM itself: see [`slim_sys::copies`].

use slim_sys::copies::OfferedCalls;

// The name is `slim_sys::copies::SYMBOL`.
#[unsafe(no_mangle)]
extern "C" fn slim_offered_1() -> *const OfferedCalls {
    slim_sys::offered()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_name_is_the_one_that_programs_look_up() {
        assert_eq!(slim_sys::copies::SYMBOL, c"slim_offered_1");
        assert!(std::ptr::eq(slim_offered_1(), slim_sys::offered()));
    }
}
