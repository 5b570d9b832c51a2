//! Cookies: what the answering side need not remember.

use std::time::{Duration, Instant};

use hmac::{Hmac, KeyInit, Mac as _};
use sha2::Sha256;

use super::message::{COOKIE_LEN, PairCookie};

/// How long a cookie counts.
pub(super) const COOKIE_LIFE: Duration = Duration::from_secs(5);

/// Bytes of a cookie that tell its age.
const AGE_LEN: usize = 4;

/// Makes cookies and knows its own ones again. It keeps nothing of them.
pub(super) struct CookieJar {
    secret: [u8; 32],
    start: Instant,
}

impl std::fmt::Debug for CookieJar {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("CookieJar")
    }
}

impl CookieJar {
    pub(super) fn new(secret: [u8; 32], now: Instant) -> Self {
        CookieJar { secret, start: now }
    }

    /// Milliseconds since the start. They wrap after 49 days, when nobody has a cookie of the first round any more.
    fn time(&self, now: Instant) -> u32 {
        now.saturating_duration_since(self.start).as_millis() as u32
    }

    /// A cookie that covers these bytes: the time, and a code of time and bytes.
    pub(super) fn issue(&self, now: Instant, covered: &[u8]) -> PairCookie {
        let mut cookie = [0; COOKIE_LEN];
        let time = self.time(now).to_be_bytes();
        let code = self.code(time, covered).finalize().into_bytes();
        cookie[..AGE_LEN].copy_from_slice(&time);
        cookie[AGE_LEN..].copy_from_slice(&code[..COOKIE_LEN - AGE_LEN]);
        PairCookie(cookie)
    }

    /// Whether it is a cookie of this jar for these bytes, and not older than this.
    pub(super) fn is_valid(
        &self,
        now: Instant,
        covered: &[u8],
        cookie: &PairCookie,
        oldest: Duration,
    ) -> bool {
        let Some((time, code)) = cookie.0.split_first_chunk() else {
            return false;
        };
        let age = self.time(now).wrapping_sub(u32::from_be_bytes(*time));
        u128::from(age) <= oldest.as_millis()
            && self
                .code(*time, covered)
                .verify_truncated_left(code)
                .is_ok()
    }

    fn code(&self, time: [u8; AGE_LEN], covered: &[u8]) -> Hmac<Sha256> {
        let hmac = Hmac::<Sha256>::new_from_slice(&self.secret);
        let mut hmac = hmac.expect("HMAC takes keys of any length");
        hmac.update(&time);
        hmac.update(covered);
        hmac
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cookie_counts_for_its_bytes_and_its_time_only() {
        let start = Instant::now();
        let jar = CookieJar::new([7; 32], start);
        let made = start + Duration::from_secs(100);
        let cookie = jar.issue(made, b"bytes");
        let counts = |jar: &CookieJar, now, covered: &[u8], cookie| {
            jar.is_valid(now, covered, &cookie, COOKIE_LIFE)
        };
        assert!(counts(&jar, made, b"bytes", cookie));
        assert!(counts(&jar, made + COOKIE_LIFE, b"bytes", cookie));
        let late = made + COOKIE_LIFE + Duration::from_millis(1);
        assert!(!counts(&jar, late, b"bytes", cookie));
        // One of the future is one of the past, after a wrap.
        assert!(!counts(
            &jar,
            made - Duration::from_millis(1),
            b"bytes",
            cookie
        ));
        assert!(!counts(&jar, made, b"other", cookie));
        let other = CookieJar::new([8; 32], start);
        assert!(!counts(&other, made, b"bytes", cookie));
        for bit in 0..COOKIE_LEN * 8 {
            let mut wrong = cookie;
            wrong.0[bit / 8] ^= 1 << (bit % 8);
            assert!(!counts(&jar, made, b"bytes", wrong), "bit {bit}");
        }
        // It wraps after 49 days.
        let made = start + Duration::from_millis(u64::from(u32::MAX) - 100);
        let cookie = jar.issue(made, b"bytes");
        assert!(counts(&jar, made + COOKIE_LIFE, b"bytes", cookie));
    }
}
