//! One version of cudarc for all: a context made by candle or burn works for the loader.

use std::sync::Arc;

use cudarc::driver::CudaContext;
use twinbuf::loader::Cuda;
use twinbuf::loader::LoaderBuilder;

pub fn upload(builder: LoaderBuilder, context: Arc<CudaContext>) -> LoaderBuilder<Cuda> {
    builder.cuda(context)
}
