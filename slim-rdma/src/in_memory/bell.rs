//! Something that is called when something has happened.

use std::fmt;
use std::sync::Arc;

#[derive(Clone)]
pub(crate) struct Bell(Arc<dyn Fn() + Send + Sync>);

impl Bell {
    pub(crate) fn new(ring: impl Fn() + Send + Sync + 'static) -> Self {
        Bell(Arc::new(ring))
    }

    pub(crate) fn ring(&self) {
        (self.0)();
    }
}

impl fmt::Debug for Bell {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Bell")
    }
}
